// SPDX-License-Identifier: MIT
// Declarations shared by the driver's parts. Attribute and error numbers are those of cuda.h.
#pragma once
#include <deque>
#include <functional>

#include "softgpu.h"

#define HOLD std::lock_guard<std::recursive_mutex> hold(host_lock)

namespace sg {

constexpr int kInvalidValue = 1, kOutOfMemory = 2, kInvalidDevice = 101, kInvalidImage = 200,
              kInvalidContext = 201, kNoBinary = 209, kInvalidHandle = 400, kNotFound = 500,
              kNotReady = 600, kNotPermitted = 800, kCaptureUnsupported = 900,
              kCaptureUnmatched = 903, kCaptureUnjoined = 904, kCaptureIsolation = 905,
              kCaptureImplicit = 906, kCapturedEvent = 907, kInvalidCluster = 912;

extern std::recursive_mutex& host_lock;
void keep_error(const std::string& text);

// Runs the work of a driver call. Returns 0, or keeps an error's text and returns its code.
template <class Work>
int status_of(Work work) {
  HOLD;
  try {
    work();
    return 0;
  } catch (const Error& error) {
    keep_error(error.text);
    return error.code;
  }
}

// The limits of a GPU of the selected compute capability.
struct Limits {
  int capability, threads_per_sm, blocks_per_sm, shared_per_sm, reserved_shared, l2_bytes;
  const char* name;
};
const Limits& limits();
inline int largest_shared() { return limits().shared_per_sm - limits().reserved_shared; }  // opt-in
int current_device();
void need_context();  // throws Error if this thread has none

// A stream runs its work in order. Each item may also wait for work of other streams.
struct Stream;
typedef std::pair<Stream*, u64> Position;  // a stream's work up to this number
struct Work {
  std::function<void()> run;
  std::vector<Position> after;
  bool is_free = false;  // frees memory: runs even if an error drops the queue
};
struct Graph {
  std::vector<std::function<void()>> work;
  Stream* origin;
};
struct Stream {
  int device;
  bool blocking;  // it and the legacy default stream wait for each other
  bool legacy = false, live = true;
  u64 enqueued = 0, done = 0;
  std::deque<Work> queue = {};
  Graph* graph = nullptr;        // the graph that captures its work
  u64 captured = 0, joined = 0;  // captured items; how many of them another stream awaits
};
Stream& stream_of(u64 handle);  // throws Error if there is none
void enqueue(Stream&, std::function<void()> run, bool is_free = false);
void finish();  // runs all queued work on all streams

}  // namespace sg
