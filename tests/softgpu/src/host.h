// SPDX-License-Identifier: MIT
// What the parts of the driver share. Numbers of attributes and errors are those of cuda.h.
#pragma once
#include <deque>
#include <functional>

#include "softgpu.h"

#define HOLD std::lock_guard<std::recursive_mutex> hold(host_lock)

namespace sg {

enum Code {
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kInvalidDevice = 101,
  kInvalidImage = 200,
  kNoBinary = 209,
  kInvalidHandle = 400,
  kNotFound = 500,
  kNotReady = 600,
  kNotPermitted = 800,
  kCaptureUnsupported = 900,
  kCaptureUnmatched = 903,
  kCaptureUnjoined = 904,
  kCaptureIsolation = 905,
  kCaptureImplicit = 906,
  kCapturedEvent = 907,
  kInvalidCluster = 912,
};

extern std::recursive_mutex& host_lock;
void keep_error(const std::string& text);

// Runs the work of a call and makes a number of its error, whose text it keeps.
template <class Work>
int answer(Work work) {
  HOLD;
  try {
    work();
    return 0;
  } catch (const Error& error) {
    keep_error(error.text);
    return error.code;
  }
}

// What a GPU of the chosen compute capability has.
struct Limits {
  int capability, threads_per_sm, blocks_per_sm, shared_per_sm, reserved_shared, l2_bytes;
  const char* name;
};
const Limits& limits();
inline int largest_shared() { return limits().shared_per_sm - limits().reserved_shared; }  // opt-in
int current_device();

// Work that is given to a stream is done in its order, after work of other streams.
struct Stream;
typedef std::pair<Stream*, u64> Position;  // all that was given to a stream up to a number
struct Work {
  std::function<void()> run;
  std::vector<Position> after;
  bool is_free = false;  // done even where an error ended what was queued
};
struct Graph {
  std::vector<std::function<void()>> work;
  Stream* origin;
};
struct Stream {
  int device;
  bool blocking;  // it and the legacy default stream wait for each other
  bool legacy = false, live = true;
  u64 given = 0, done = 0;
  std::deque<Work> queue = {};
  Graph* graph = nullptr;        // in which its work is captured
  u64 captured = 0, joined = 0;  // how much that is, and how much another stream waits for
};
Stream& stream_of(u64 handle);  // throws Error where there is none
void give(Stream&, std::function<void()> run, bool is_free = false);
void finish();  // does all that is queued, on all streams

}  // namespace sg
