// Streams and events: what each stream was given to do, and what is known to be over before what.
//
// Kernels run when they are called. Copies between the device and the host, which CUDA leaves to a copy engine, run as LATE
// as the program allows: once a kernel follows on their stream, a stream that waits for them has a kernel, or the host
// waits. Whoever reads too early finds poison. What would run too EARLY on a device cannot be seen that way, as kernels are
// over when they return; so each piece of work has a number on its stream, each stream knows up to which number it comes
// behind each other one, and two uses of a block of memory with no order between them are a race.
#pragma once

#include <c10/core/Stream.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace fake {

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr int kDevices = 2, kStreams = 9;  // stream 0 is the default one; the others are given out in turn
constexpr int kAll = kDevices * kStreams;
constexpr unsigned char kPoison = 0xFF;  // NaN as any float, -1 as any integer

inline int64_t setting(const char* name, int64_t otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::atoll(text);
}

// All below is guarded by one lock. It, and all else that lasts, is never destroyed: tensors may outlive any of it.
inline std::recursive_mutex& lock() {
  static auto* one = new std::recursive_mutex;
  return *one;
}
using Locked = std::lock_guard<std::recursive_mutex>;

using Moment = std::array<uint64_t, kAll>;  // for each stream, up to which number its work is over by then

inline void advance(Moment& moment, const Moment& other) {
  for (int i = 0; i < kAll; ++i) moment[i] = std::max(moment[i], other[i]);
}

struct Stream {
  std::deque<std::pair<uint64_t, std::function<void()>>> waiting;
  uint64_t given = 0, done = 0;
  Moment after{};  // what comes next here comes behind that
};

struct Event {
  int stream = 0;
  uint64_t number = 0;
  Moment moment{};
  std::chrono::steady_clock::time_point time;
};

struct Device {
  std::array<Stream, kAll> streams;
  Moment host{};  // what the host has waited for
  bool late = true;
  int64_t waits = 0;  // of the host
  std::vector<std::string> races;
};
inline Device& device() {
  static auto* one = new Device;
  return *one;
}

// Both are a thread's own, as on CUDA: the thread that runs backward begins with device 0 and its default stream.
inline int& current_device() {
  thread_local int index = 0;
  return index;
}
inline int& current_stream_of(int index) {
  thread_local std::array<int, kDevices> streams{};
  return streams[index];
}
inline int current_stream(int index) { return index * kStreams + current_stream_of(index); }
inline int number_of(const c10::Stream& stream) { return stream.device_index() * kStreams + static_cast<int>(stream.id()); }
inline c10::Stream stream_of(int number) {
  const c10::Device place(kType, static_cast<c10::DeviceIndex>(number / kStreams));
  return c10::Stream(c10::Stream::UNSAFE, place, number % kStreams);
}

inline bool is_over(int stream, uint64_t number) { return device().streams[stream].done >= number; }

inline void run_until(int stream, uint64_t number) {
  auto& it = device().streams[stream];
  while (it.done < number && !it.waiting.empty()) {
    auto [own, work] = std::move(it.waiting.front());
    it.waiting.pop_front();
    work();
    it.done = own;
  }
}

inline uint64_t give(int stream, std::function<void()> work) {
  auto& it = device().streams[stream];
  advance(it.after, device().host);
  it.waiting.emplace_back(++it.given, std::move(work));
  if (!device().late) run_until(stream, it.given);
  return it.given;
}

inline uint64_t begin_kernel(int stream) {
  auto& it = device().streams[stream];
  run_until(stream, it.given);
  advance(it.after, device().host);
  return it.done = ++it.given;
}

inline void host_waits(int stream, uint64_t number, const Moment& moment) {
  ++device().waits;
  run_until(stream, number);
  advance(device().host, moment);
  device().host[stream] = std::max(device().host[stream], number);
}
inline void host_waits_for_stream(int stream) {
  auto& it = device().streams[stream];
  host_waits(stream, it.given, it.after);
}
inline void host_waits_for_device(int index) {
  for (int stream = index * kStreams; stream < (index + 1) * kStreams; ++stream) host_waits_for_stream(stream);
  device().waits -= kStreams - 1;  // it counts once
}

inline void record(const std::shared_ptr<Event>& event, int stream) {
  auto& it = device().streams[stream];
  event->stream = stream;
  event->moment = it.after;
  event->number = give(stream, [event] { event->time = std::chrono::steady_clock::now(); });
  if (it.waiting.size() == 1) run_until(stream, it.given);  // nothing is late here
  event->moment[stream] = event->number;
}

inline void stream_waits(int stream, const std::shared_ptr<Event>& event) {
  advance(device().streams[stream].after, event->moment);
  if (!is_over(event->stream, event->number)) give(stream, [event] { run_until(event->stream, event->number); });
}

struct Use {
  int stream;
  uint64_t number;
};

inline bool comes_behind(int stream, const Use& use) {
  const uint64_t known = std::max(device().streams[stream].after[use.stream], device().host[use.stream]);
  return use.stream == stream || use.number <= known;
}

inline void race(const std::string& what, int stream, const char* then, const Use& use, const char* before) {
  auto name = [](int one) { return "stream " + std::to_string(one % kStreams); };
  if (device().races.size() < 100)
    device().races.push_back(what + ": " + name(stream) + " " + then + " what " + name(use.stream) + " " + before +
                             ", and does not wait for it");
}

// Of one block of memory: the last write, and what has read since.
struct Uses {
  std::vector<Use> writes, reads;

  void add(const std::string& what, const Use& use, bool is_write) {
    for (const auto& other : writes)
      if (!comes_behind(use.stream, other)) race(what, use.stream, is_write ? "writes" : "reads", other, "has written");
    if (!is_write) {
      std::erase_if(reads, [&](const Use& other) { return other.stream == use.stream; });
      reads.push_back(use);
      return;
    }
    for (const auto& other : reads)
      if (!comes_behind(use.stream, other)) race(what, use.stream, "writes", other, "has read");
    reads.clear();
    writes.assign(1, use);
  }
};

}  // namespace fake
