// Memory: a caching allocator by the rules of CUDA's (c10/cuda/CUDACachingAllocator.cpp, without its options).
//
// Sizes are rounded up to 512 bytes. Up to 1 MiB comes from segments of 2 MiB, up to 10 MiB from segments of 20 MiB, more
// from segments of whole 2 MiB. The smallest free block that is large enough is taken, and split if any rest of a small one,
// or more than 1 MiB of a large one, remains; else the rest counts as allocated, too. Neighbours merge once free. A block is
// its stream's; what record_stream says other streams use is free again once they are past it. New and freed memory is
// poison. Where the limit is reached, all free segments are given back before torch.OutOfMemoryError.
#pragma once

#include "streams.h"

#include <c10/core/CachingDeviceAllocator.h>

#include <cstring>
#include <list>
#include <set>

namespace fake {

constexpr size_t kGranule = 512, kSmall = 1 << 20, kSegment = 2 << 20, kMiddle = 20 << 20;

struct Block {
  int stream;
  bool is_small, in_use = false;
  size_t size;
  char* data;
  size_t asked = 0;
  Block *left = nullptr, *right = nullptr;  // neighbours in the segment
  Uses uses;
  std::set<int> others;      // streams that use it, by record_stream
  std::vector<Use> pending;  // by streams that nothing was said of: its own stream has not waited for these
  int index() const { return stream / kStreams; }
};

struct Memory {  // of one device
  struct Fit {
    bool operator()(const Block* a, const Block* b) const {
      return std::tie(a->stream, a->size, a->data) < std::tie(b->stream, b->size, b->data);
    }
  };
  size_t limit = size_t{8} << 30, reserved = 0;
  std::set<Block*, Fit> free[2];                           // large ones, small ones
  std::list<std::pair<Block*, std::vector<Use>>> waiting;  // given back while other streams use them, and until when
  c10::CachingDeviceAllocator::DeviceStats stats;
  size_t highest = 0;  // allocated bytes, for the tests: resetting the device's own statistics leaves it as it is

  void count(c10::CachingAllocator::StatArray& stat, const Block* block, size_t amount, bool more) {
    for (size_t kind : {size_t{0}, size_t{block->is_small ? 1u : 2u}})
      more ? stat[kind].increase(amount) : stat[kind].decrease(amount);
  }
  void count_allocated(const Block* block, bool more) {
    count(stats.allocation, block, 1, more);
    count(stats.allocated_bytes, block, block->size, more);
    count(stats.requested_bytes, block, block->asked, more);
    highest = std::max(highest, static_cast<size_t>(stats.allocated_bytes[0].current));
  }
  void count_active(const Block* block, bool more) {
    count(stats.active, block, 1, more);
    count(stats.active_bytes, block, block->size, more);
  }
  void count_segment(const Block* block, bool more) {
    count(stats.segment, block, 1, more);
    count(stats.reserved_bytes, block, block->size, more);
    more ? reserved += block->size : reserved -= block->size;
  }
};
inline Memory& memory(int index) {
  static auto* all = new std::array<Memory, kDevices>;
  return (*all)[index];
}

class Allocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const Locked locked(lock());
    const int index = current_device();
    Block* block = bytes == 0 ? nullptr : take(index, bytes);
    return {block ? block->data : nullptr, block, &give_back, c10::Device(kType, static_cast<c10::DeviceIndex>(index))};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }  // a DataPtr holds a Block, not just an address
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
  bool initialized() override { return true; }

  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    const Locked locked(lock());
    auto* block = static_cast<Block*>(data.get_context());
    if (block != nullptr && number_of(stream) != block->stream) block->others.insert(number_of(stream));
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    const Locked locked(lock());
    return memory(index).stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex index) override {
    for_each_stat(index, [](auto& stat) { stat.reset_accumulated(); });
  }
  void resetPeakStats(c10::DeviceIndex index) override {
    for_each_stat(index, [](auto& stat) { stat.reset_peak(); });
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) override {
    const Locked locked(lock());
    const auto& it = memory(index);
    return {it.limit - std::min(it.reserved, it.limit), it.limit};
  }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {
    const Locked locked(lock());
    for (int index = 0; index < kDevices; ++index) give_segments_back(index);
  }

 private:
  template <class Do>
  static void for_each_stat(int index, Do&& what) {
    const Locked locked(lock());
    auto& it = memory(index).stats;
    for (auto* kinds : {&it.allocation, &it.segment, &it.active, &it.inactive_split, &it.allocated_bytes, &it.reserved_bytes,
                        &it.active_bytes, &it.inactive_split_bytes, &it.requested_bytes})
      for (auto& stat : *kinds) what(stat);
  }

  static Block* take(int index, size_t bytes) {
    auto& it = memory(index);
    look_at_waiting(index);
    const size_t size = (bytes + kGranule - 1) / kGranule * kGranule;
    const int stream = current_stream(index);
    const bool is_small = size <= kSmall;
    Block least{stream, is_small};
    least.size = size;
    least.data = nullptr;
    auto found = it.free[is_small].lower_bound(&least);
    Block* block;
    if (found != it.free[is_small].end() && (*found)->stream == stream) {
      block = *found;
      it.free[is_small].erase(found);
    } else {
      block = new_segment(index, stream, is_small, size);
    }
    if (const size_t rest = block->size - size; is_small ? rest > 0 : rest > kSmall) split(block, size);
    for (const auto& use : block->pending)
      if (!comes_behind(stream, use)) race("new memory", stream, "is given", use, "may still use");
    block->pending.clear();
    block->in_use = true;
    block->asked = bytes;
    block->uses = {};
    block->uses.writes.push_back({stream, device().streams[stream].given});  // other streams must wait for what was before
    poison(block);
    it.count_allocated(block, true);
    it.count_active(block, true);
    return block;
  }

  static Block* new_segment(int index, int stream, bool is_small, size_t size) {
    auto& it = memory(index);
    const size_t whole = is_small ? kSegment : size < kMiddle / 2 ? kMiddle : (size + kSegment - 1) / kSegment * kSegment;
    if (it.reserved + whole > it.limit) {
      ++it.stats.num_alloc_retries;
      give_segments_back(index);
    }
    if (it.reserved + whole > it.limit) {
      ++it.stats.num_ooms;
      TORCH_CHECK_WITH(OutOfMemoryError, false, "fake out of memory. Tried to allocate ", size, " bytes; device ", index, " has ",
                       it.limit, " bytes, ", it.reserved, " of them reserved, ", it.stats.allocated_bytes[0].current, " allocated.");
    }
    auto* block = new Block{stream, is_small};
    block->size = whole;
    block->data = static_cast<char*>(std::aligned_alloc(kGranule, whole));
    ++it.stats.num_device_alloc;
    it.count_segment(block, true);
    return block;
  }

  static void split(Block* block, size_t size) {
    auto* rest = new Block(*block);
    rest->size -= size;
    rest->data += size;
    rest->left = block;
    if (rest->right != nullptr) rest->right->left = rest;
    block->right = rest;
    block->size = size;
    memory(block->index()).free[block->is_small].insert(rest);
  }

  static void give_back(void* context) {
    if (context == nullptr) return;
    const Locked locked(lock());
    auto* block = static_cast<Block*>(context);
    auto& it = memory(block->index());
    block->in_use = false;
    it.count_allocated(block, false);
    for (const auto* uses : {&block->uses.writes, &block->uses.reads})
      for (const auto& use : *uses)
        if (!comes_behind(block->stream, use) && !block->others.contains(use.stream)) block->pending.push_back(use);
    std::vector<Use> until;
    for (int stream : std::exchange(block->others, {})) until.push_back({stream, device().streams[stream].given});
    until.empty() ? make_free(block) : static_cast<void>(it.waiting.emplace_back(block, std::move(until)));
  }

  static void look_at_waiting(int index) {
    std::vector<Block*> past;
    std::erase_if(memory(index).waiting, [&](const auto& one) {
      const auto& [block, until] = one;
      const bool is_past = std::all_of(until.begin(), until.end(), [](const Use& use) { return is_over(use.stream, use.number); });
      if (is_past) past.push_back(block);
      return is_past;
    });
    for (auto* block : past) make_free(block);
  }

  static void make_free(Block* block) {
    auto& it = memory(block->index());
    it.count_active(block, false);
    if (block->pending.empty()) poison(block);  // else a use that nobody was told of is right until the next owner writes
    for (Block* other : {block->left, block->right}) {
      if (other == nullptr || other->in_use || it.free[block->is_small].erase(other) == 0) continue;  // or it waits
      Block *first = other == block->left ? other : block, *second = first->right;
      first->size += second->size;
      first->right = second->right;
      if (first->right != nullptr) first->right->left = first;
      first->pending.insert(first->pending.end(), second->pending.begin(), second->pending.end());
      delete second;
      block = first;
    }
    it.free[block->is_small].insert(block);
  }

  static void poison(const Block* block) {
    auto now = [data = block->data, size = block->size] { std::memset(data, kPoison, size); };
    const auto& stream = device().streams[block->stream];
    stream.waiting.empty() ? now() : static_cast<void>(give(block->stream, now));  // behind copies that are late
  }

  static void give_segments_back(int index) {
    host_waits_for_device(index);
    look_at_waiting(index);
    auto& it = memory(index);
    for (auto& blocks : it.free)
      std::erase_if(blocks, [&](Block* block) {
        if (block->left != nullptr || block->right != nullptr) return false;
        ++it.stats.num_device_free;
        it.count_segment(block, false);
        std::free(block->data);
        delete block;
        return true;
      });
  }
};

inline Allocator& allocator() {
  static auto* one = new Allocator;
  return *one;
}

}  // namespace fake
