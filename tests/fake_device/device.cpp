// A fake accelerator for PyTorch's CPU build, for tests: memory, streams and random numbers as on CUDA, the CPU's kernels.
// streams.h, memory.h and operators.h are what it does; this file is what PyTorch asks of a device.
#include "operators.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace fake {

int device_count() {
  static const int count = std::clamp(static_cast<int>(setting("FAKE_DEVICES", 1)), 1, kDevices);
  return count;
}
c10::DeviceIndex or_current(c10::DeviceIndex index) { return index < 0 ? static_cast<c10::DeviceIndex>(current_device()) : index; }

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&any_operator>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", item);
  m.impl("record_stream", [](at::Tensor& self, c10::Stream stream) { allocator().recordStream(self.storage().data_ptr(), stream); });
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  m.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
  m.impl("set_.source_Tensor", TORCH_FN(at::native::set_tensor_));
  m.impl("set_.source_Storage", TORCH_FN(at::native::set_));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(at::native::set_storage_cpu_));
  m.impl("set_", [](at::Tensor& self) -> at::Tensor& {
    const c10::DeviceGuard guard(self.device());
    return self.set_(c10::Storage(c10::Storage::use_byte_size_t(), 0, &allocator(), true), 0, {0}, {});
  });
  m.impl("resize_", [](const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) -> const at::Tensor& {
    const c10::DeviceGuard guard(self.device());
    return at::native::resize_(self, size, format);
  });
  // Whose own kernels raise before a fallback is asked:
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&any_operator>());
  m.impl("convolution_backward_overrideable", torch::CppFunction::makeFromBoxedFunction<&any_operator>());
  m.impl("histc", histc);
  m.impl("_thnn_fused_lstm_cell", lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward);
  m.impl("_thnn_fused_gru_cell", gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", gru_cell_backward);
}

// Autocast by CUDA's lists, without those that give softmax and sums a dtype which the CPU's kernels do not take.
#define FAKE_LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FAKE_FLOAT32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define FAKE_PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  AT_FORALL_LOWER_PRECISION_FP(FAKE_LOWER)
  AT_FORALL_FP32(FAKE_FLOAT32)
  AT_FORALL_PROMOTE(FAKE_PROMOTE)
  KERNEL_PRIVATEUSEONE(batch_norm, fp32)  // the CPU's takes no float16 beside float32
}

TORCH_LIBRARY(fake_device, m) {  // an operator, since a Generator gets to Python no other way without its headers
  m.def("default_generator(int index) -> Generator?", [](int64_t index) { return default_generator(static_cast<int>(index)); });
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device getDevice() const override { return {kType, or_current(-1)}; }
  void setDevice(c10::Device place) const override { uncheckedSetDevice(place); }
  void uncheckedSetDevice(c10::Device place) const noexcept override {
    if (place.has_index() && place.index() < device_count()) current_device() = place.index();
  }
  c10::Device exchangeDevice(c10::Device place) const override {
    const auto before = getDevice();
    setDevice(place);
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(device_count()); }

  c10::Stream getStream(c10::Device place) const override { return stream_of(current_stream(or_current(place.index()))); }
  c10::Stream getDefaultStream(c10::Device place) const override { return stream_of(or_current(place.index()) * kStreams); }
  c10::Stream getNewStream(c10::Device place, int = 0) const override {
    static int next = 0;
    const Locked locked(lock());
    return stream_of(or_current(place.index()) * kStreams + 1 + next++ % (kStreams - 1));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device place, bool = false) const override { return getNewStream(place); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto before = getStream(stream.device());
    current_stream_of(stream.device_index()) = static_cast<int>(stream.id());
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override {
    const Locked locked(lock());
    return is_over(number_of(stream), device().streams[number_of(stream)].given);
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    const Locked locked(lock());
    host_waits_for_stream(number_of(stream));
  }
  void synchronizeDevice(const c10::DeviceIndex index) const override {
    const Locked locked(lock());
    host_waits_for_device(or_current(index));
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override { allocator().recordStream(data, stream); }

  using Handle = std::shared_ptr<Event>;
  static const Event& of(void* event) { return **static_cast<Handle*>(event); }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Handle*>(event); }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    const Locked locked(lock());
    if (*event == nullptr) *event = new Handle;
    fake::record(*static_cast<Handle*>(*event) = std::make_shared<Event>(), number_of(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    const Locked locked(lock());
    if (event != nullptr) stream_waits(number_of(stream), *static_cast<Handle*>(event));
  }
  bool queryEvent(void* event) const override {
    const Locked locked(lock());
    return event == nullptr || is_over(of(event).stream, of(event).number);
  }
  void synchronizeEvent(void* event) const override {
    const Locked locked(lock());
    if (event != nullptr) host_waits(of(event).stream, of(event).number, of(event).moment);
  }
  double elapsedTime(void* begin, void* end, const c10::DeviceIndex) const override {
    TORCH_CHECK(begin && end && queryEvent(begin) && queryEvent(end), "both events must be over to tell the time between them");
    return std::chrono::duration<double, std::milli>(of(end).time - of(begin).time).count();
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(device_count()); }
  c10::DeviceIndex getCurrentDevice() const override { return or_current(-1); }
  void setCurrentDevice(c10::DeviceIndex index) const override { exchangeDevice(index); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    TORCH_CHECK(index < device_count(), "there is no fake device ", static_cast<int>(index));
    return static_cast<c10::DeviceIndex>(std::exchange(current_device(), index));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return index < 0 ? or_current(index) : exchangeDevice(index); }
  at::Device getDeviceFromPtr(void*) const override { return {kType, or_current(-1)}; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override { return default_generator(or_current(index)); }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override { return at::make_generator<Generator>(or_current(index)); }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &host_allocator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override { resize_storage(storage, bytes); }
};
REGISTER_HOST_ALLOCATOR(c10::DeviceType::PrivateUse1, &host_allocator())
const bool is_registered = [] {
  c10::SetAllocator(kType, &allocator());
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

}  // namespace fake

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &fake::choice_of_attention)
}

// For Python, by ctypes: what a test sets and looks at.
extern "C" {
void fake_set_limit(int index, size_t bytes) { fake::memory(index).limit = bytes; }
void fake_set_late(int late) { fake::device().late = late != 0; }
int64_t fake_waits() { return fake::device().waits; }
int64_t fake_highest(int index, int begin_anew) {
  const fake::Locked locked(fake::lock());
  auto& it = fake::memory(index);
  if (begin_anew != 0) it.highest = static_cast<size_t>(it.stats.allocated_bytes[0].current);
  return static_cast<int64_t>(it.highest);
}
int fake_take_race(char* text, int size) {
  const fake::Locked locked(fake::lock());
  auto& races = fake::device().races;
  if (races.empty()) return 0;
  std::snprintf(text, static_cast<size_t>(size), "%s", races.back().c_str());
  races.pop_back();
  return 1;
}
void fake_pin(void* data, size_t bytes) {
  const fake::Locked locked(fake::lock());
  fake::pinned()[static_cast<char*>(data)] = bytes;
}
int fake_unpin(void* data) {
  const fake::Locked locked(fake::lock());
  return static_cast<int>(fake::pinned().erase(static_cast<char*>(data)));
}
}
