// SPDX-License-Identifier: MIT
// Streams, events and graphs. Work runs when it is enqueued or, if streams are late, when something
// waits for it.
#include <algorithm>

#include "host.h"

namespace sg {

static auto& streams = *new std::vector<Stream*>;  // in order of creation

static Stream& make_stream(int device, bool blocking, bool legacy = false) {
  streams.push_back(
      new Stream{device, blocking, legacy});  // never deleted, so that no handle is reused
  return *streams.back();
}
static Stream& legacy_stream(int device) {
  for (Stream* s : streams)
    if (s->legacy && s->device == device) return *s;
  return make_stream(device, false, true);
}
Stream& stream_of(u64 handle) {
  if (handle < 2) return legacy_stream(current_device());
  Stream* s = reinterpret_cast<Stream*>(handle);
  if (std::find(streams.begin(), streams.end(), s) == streams.end() || !s->live)
    throw Error{kInvalidHandle, "there is no such stream"};
  return *s;
}

// After an error, runs the queued frees and drops all other queued work.
static void drop_queues() {
  for (Stream* s : streams) {
    for (Work& w : s->queue)
      if (w.is_free) w.run();
    s->queue.clear();
    s->done = s->enqueued;
  }
}

static void complete(Stream& s, u64 position) {
  while (s.done < position) {
    for (auto& [other, before] : std::vector<Position>(s.queue.front().after))
      complete(*other, before);
    Work work = std::move(s.queue.front());
    s.queue.pop_front();
    ++s.done;
    try {
      work.run();
    } catch (const Error&) {
      drop_queues();
      throw;
    }
  }
}

static void put(Stream& s, Work work) {
  for (Stream* other : streams) {
    const bool ordered = s.legacy ? other->blocking : s.blocking && other->legacy;
    if (other->device != s.device || !ordered) continue;
    if (other->graph && !work.is_free)
      throw Error{kCaptureImplicit, "the default stream would wait for a captured stream"};
    if (other->done < other->enqueued) work.after.push_back({other, other->enqueued});
  }
  s.queue.push_back(std::move(work));
  ++s.enqueued;
  if (!setting(kStreamsAreLate)) complete(s, s.enqueued);
}

void enqueue(Stream& s, std::function<void()> run, bool is_free) {
  if (s.graph && !is_free) {
    s.graph->work.push_back(std::move(run));
    ++s.captured;
  } else {
    put(s, {std::move(run), {}, is_free});
  }
}

// Work may enqueue more work: destroying a finished item can free memory.
static void complete(Stream& s) {
  while (s.done < s.enqueued) complete(s, s.enqueued);
}
static void finish(int device) {
  for (size_t k = 0; k < streams.size(); ++k) {
    Stream& s = *streams[setting(kStreamsAreLate) == 2 ? streams.size() - 1 - k : k];
    if (device < 0 || s.device == device) complete(s);
  }
}
void finish() { finish(-1); }

static void check_not_captured(const Stream& s) {
  if (s.graph) throw Error{kCaptureUnsupported, "nothing can wait for a captured stream"};
}

struct Event {
  Stream* stream = nullptr;
  u64 position = 0;  // in the stream, or in its captured work
  Graph* graph = nullptr;
};

static void record(Event& e, Stream& s) {
  enqueue(s, [] {});
  e.stream = &s, e.graph = s.graph;
  e.position = s.graph ? s.captured : s.enqueued;
}
static void wait(Stream& s, const Event& e) {
  if (e.graph) {
    const bool going = std::any_of(streams.begin(), streams.end(),
                                   [&](const Stream* t) { return t->graph == e.graph; });
    if (!going || (s.graph && s.graph != e.graph))
      throw Error{kCapturedEvent, "an event of another capture is waited for"};
    if (!s.graph) s.graph = e.graph, s.captured = s.joined = 0;
    if (&s != e.stream) e.stream->joined = std::max(e.stream->joined, e.position);
  } else if (s.graph) {
    if (e.stream)
      throw Error{kCaptureIsolation, "a captured stream waits for what is not captured"};
  } else if (e.stream && e.stream->done < e.position) {
    put(s, {[] {}, {{e.stream, e.position}}});
  }
}
static void begin_capture(Stream& s) {
  if (s.legacy) throw Error{kCaptureUnsupported, "the default stream cannot be captured"};
  if (s.graph) throw Error{kInvalidValue, "the stream is captured already"};
  s.graph = new Graph{{}, &s};
  s.captured = 0;
}
static Graph* end_capture(Stream& s) {
  Graph* graph = s.graph;
  if (!graph || graph->origin != &s) throw Error{kCaptureUnmatched, "no capture began here"};
  bool joined = true;
  for (Stream* t : streams) {
    if (t->graph != graph) continue;
    joined &= t == &s || t->joined >= t->captured;
    t->graph = nullptr;
  }
  if (!joined) throw Error{kCaptureUnjoined, "nothing waits for another captured stream"};
  return graph;
}

}  // namespace sg

using namespace sg;

extern "C" {

int cuStreamCreate(u64* handle, unsigned flags) {
  return status_of([&] { *handle = u64(&make_stream(current_device(), !(flags & 1))); });
}
int cuStreamDestroy_v2(u64 handle) {
  return status_of([&] { stream_of(handle).live = false; });
}
int cuStreamSynchronize(u64 handle) {
  return status_of([&] {
    Stream& s = stream_of(handle);
    check_not_captured(s);
    complete(s);
  });
}
int cuStreamQuery(u64 handle) {
  bool done = true;
  const int code = status_of([&] {
    const Stream& s = stream_of(handle);
    check_not_captured(s);
    done = s.done == s.enqueued;
  });
  return code ? code : done ? 0 : kNotReady;
}
int cuStreamWaitEvent(u64 handle, Event* e, unsigned) {
  return status_of([&] { wait(stream_of(handle), *e); });
}
int cuCtxSynchronize() {
  return status_of([&] {
    for (Stream* s : streams)
      if (s->device == current_device()) check_not_captured(*s);
    finish(current_device());
  });
}
int cuLaunchHostFunc(u64 handle, void (*function)(void*), void* argument) {
  return status_of([&] { enqueue(stream_of(handle), [=] { function(argument); }); });
}

int cuEventCreate(Event** e, unsigned) { return *e = new Event, 0; }
int cuEventDestroy_v2(Event* e) {
  return status_of([&] { delete e; });
}
int cuEventRecord(Event* e, u64 handle) {
  return status_of([&] { record(*e, stream_of(handle)); });
}
int cuEventQuery(Event* e) {
  HOLD;
  if (e->graph) return kCapturedEvent;
  return !e->stream || e->stream->done >= e->position ? 0 : kNotReady;
}
int cuEventSynchronize(Event* e) {
  return status_of([&] {
    if (e->graph) throw Error{kCapturedEvent, "nothing can wait for a captured event"};
    if (e->stream) complete(*e->stream, e->position);
  });
}
int cuStreamIsCapturing(u64 handle, int* is) {
  return status_of([&] { *is = stream_of(handle).graph != nullptr; });
}
int cuStreamBeginCapture_v2(u64 handle, int) {
  return status_of([&] { begin_capture(stream_of(handle)); });
}
int cuStreamEndCapture(u64 handle, Graph** graph) {
  return status_of([&] { *graph = end_capture(stream_of(handle)); });
}
int cuGraphLaunch(Graph* graph, u64 handle) {
  return status_of([&] {
    for (auto& work : graph->work) enqueue(stream_of(handle), work);
  });
}
}  // extern "C"
