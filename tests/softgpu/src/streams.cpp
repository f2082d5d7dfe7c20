// SPDX-License-Identifier: MIT
// Streams, events and graphs. Work is done when it is given to a stream, or, where streams are
// late, when somebody waits for it.
#include <algorithm>

#include "host.h"

namespace sg {

static auto& streams = *new std::vector<Stream*>;  // in the order in which they were made

static Stream& made(int device, bool blocking, bool legacy = false) {
  streams.push_back(new Stream{device, blocking, legacy});  // kept: a handle is never used again
  return *streams.back();
}
static Stream& legacy_stream(int device) {
  for (Stream* s : streams)
    if (s->legacy && s->device == device) return *s;
  return made(device, false, true);
}
Stream& stream_of(u64 handle) {
  if (handle < 2) return legacy_stream(current_device());
  if (handle == 2) {
    static thread_local std::map<int, Stream*> of_thread;
    Stream*& s = of_thread[current_device()];
    return s ? *s : *(s = &made(current_device(), true));
  }
  Stream* s = reinterpret_cast<Stream*>(handle);
  if (std::find(streams.begin(), streams.end(), s) == streams.end() || !s->live)
    throw Error{kInvalidHandle, "a stream that is not there"};
  return *s;
}

// After an error nothing of what is queued is done but that memory is freed.
static void abandon() {
  for (Stream* s : streams) {
    for (Work& w : s->queue)
      if (w.is_free) w.run();
    s->queue.clear();
    s->done = s->given;
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
      abandon();
      throw;
    }
  }
}

static void put(Stream& s, Work work) {
  for (Stream* other : streams) {
    const bool ordered = s.legacy ? other->blocking : s.blocking && other->legacy;
    if (other->device != s.device || !ordered) continue;
    if (other->graph && !work.is_free)
      throw Error{kCaptureImplicit, "the default stream would wait for one that is captured"};
    if (other->done < other->given) work.after.push_back({other, other->given});
  }
  s.queue.push_back(std::move(work));
  ++s.given;
  if (!settings().late_streams) complete(s, s.given);
}

void give(Stream& s, std::function<void()> run, bool is_free) {
  if (s.graph && !is_free) {
    s.graph->work.push_back(std::move(run));
    ++s.captured;
  } else {
    put(s, {std::move(run), {}, is_free});
  }
}

// Work may give more work: what is freed when it lets go of it.
static void complete(Stream& s) {
  while (s.done < s.given) complete(s, s.given);
}
static void finish(int device) {
  for (size_t k = 0; k < streams.size(); ++k) {
    Stream& s = *streams[settings().streams_reversed ? streams.size() - 1 - k : k];
    if (device < 0 || s.device == device) complete(s);
  }
}
void finish() { finish(-1); }

static void not_captured(const Stream& s) {
  if (s.graph) throw Error{kCaptureUnsupported, "nobody can wait for a stream that is captured"};
}

struct Event {
  Stream* stream = nullptr;
  u64 position = 0;  // in the stream, or in what is captured of it
  Graph* graph = nullptr;
};

static void record(Event& e, Stream& s) {
  give(s, [] {});
  e.stream = &s, e.graph = s.graph;
  e.position = s.graph ? s.captured : s.given;
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
  if (!joined) throw Error{kCaptureUnjoined, "nobody waits for a stream that was captured, too"};
  return graph;
}

}  // namespace sg

using namespace sg;

extern "C" {

int cuStreamCreate(u64* handle, unsigned flags) {
  return answer([&] { *handle = u64(&made(current_device(), !(flags & 1))); });
}
int cuStreamDestroy_v2(u64 handle) {
  return answer([&] { stream_of(handle).live = false; });
}
int cuStreamSynchronize(u64 handle) {
  return answer([&] {
    Stream& s = stream_of(handle);
    not_captured(s);
    complete(s);
  });
}
int cuStreamQuery(u64 handle) {
  bool done = true;
  const int code = answer([&] {
    const Stream& s = stream_of(handle);
    not_captured(s);
    done = s.done == s.given;
  });
  return code ? code : done ? 0 : kNotReady;
}
int cuStreamWaitEvent(u64 handle, Event* e, unsigned) {
  return answer([&] { wait(stream_of(handle), *e); });
}
int cuCtxSynchronize() {
  return answer([&] {
    for (Stream* s : streams)
      if (s->device == current_device()) not_captured(*s);
    finish(current_device());
  });
}
int cuLaunchHostFunc(u64 handle, void (*function)(void*), void* given) {
  return answer([&] { give(stream_of(handle), [=] { function(given); }); });
}

int cuEventCreate(Event** e, unsigned) { return *e = new Event, 0; }
int cuEventDestroy_v2(Event* e) {
  return answer([&] { delete e; });
}
int cuEventRecord(Event* e, u64 handle) {
  return answer([&] { record(*e, stream_of(handle)); });
}
int cuEventQuery(Event* e) {
  HOLD;
  if (e->graph) return kCapturedEvent;
  return !e->stream || e->stream->done >= e->position ? 0 : kNotReady;
}
int cuEventSynchronize(Event* e) {
  return answer([&] {
    if (e->graph) throw Error{kCapturedEvent, "nobody can wait for an event that is captured"};
    if (e->stream) complete(*e->stream, e->position);
  });
}
int cuStreamIsCapturing(u64 handle, int* is) {
  return answer([&] { *is = stream_of(handle).graph != nullptr; });
}
int cuStreamBeginCapture_v2(u64 handle, int) {
  return answer([&] { begin_capture(stream_of(handle)); });
}
int cuStreamEndCapture(u64 handle, Graph** graph) {
  return answer([&] { *graph = end_capture(stream_of(handle)); });
}
int cuGraphLaunch(Graph* graph, u64 handle) {
  return answer([&] {
    for (auto& work : graph->work) give(stream_of(handle), work);
  });
}
int cuGraphDestroy(Graph* graph) {
  return answer([&] { delete graph; });
}

}  // extern "C"
