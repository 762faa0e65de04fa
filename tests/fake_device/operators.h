// Operators: the CPU's kernels on the same memory, in the order of the device's streams.
#pragma once

#include "memory.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <map>
#include <thread>

namespace fake {

inline const c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);
inline bool is_ours(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kType; }

// ---- Random numbers. A generator is a seed and an offset, which each operator that draws advances; 16 bytes, as Philox.

struct Generator final : c10::GeneratorImpl {
  struct State {
    uint64_t seed = c10::default_rng_seed_val, offset = 0;
  } state;

  explicit Generator(c10::DeviceIndex index) : GeneratorImpl(c10::Device(kType, index), kKeys) {}
  static c10::DeviceType device_type() { return kType; }
  void set_current_seed(uint64_t seed) override { state = {seed, 0}; }
  uint64_t current_seed() const override { return state.seed; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return state.seed;
  }
  void set_offset(uint64_t offset) override { state.offset = offset; }
  uint64_t get_offset() const override { return state.offset; }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto bytes = at::empty({sizeof state}, at::kByte);
    std::memcpy(bytes.data_ptr(), &state, sizeof state);
    return bytes.getIntrusivePtr();
  }
  void set_state(const c10::TensorImpl& bytes) override {
    TORCH_CHECK(bytes.is_cpu() && bytes.numel() == sizeof state, "this is no state of a fake device's generator");
    std::memcpy(&state, bytes.data(), sizeof state);
  }
  Generator* clone_impl() const override {
    auto* other = new Generator(device().index());
    other->state = state;
    return other;
  }
};
inline const at::Generator& default_generator(int index) {
  static auto* all = new std::array<at::Generator, kDevices>{at::make_generator<Generator>(0), at::make_generator<Generator>(1)};
  return (*all)[index];
}

class Draw {  // while it lives, the CPU's kernels draw what is a device's turn
 public:
  explicit Draw(const at::Generator& from) {
    auto& state = from.get<Generator>()->state;
    cpu_.set_current_seed(state.seed * 1000003 + state.offset);
    state.offset += 4;
  }
  ~Draw() { cpu_.set_state(before_); }

 private:
  const Locked locked_{lock()};
  at::Generator cpu_ = at::detail::getDefaultCPUGenerator();
  at::Tensor before_ = cpu_.get_state();
};

// ---- Pinned memory: what was allocated as such, in powers of two as on CUDA, and what was registered.

inline std::map<const char*, size_t>& pinned() {
  static auto* all = new std::map<const char*, size_t>;
  return *all;
}
inline bool is_pinned(const void* data) {
  const Locked locked(lock());
  const auto* byte = static_cast<const char*>(data);
  auto next = pinned().upper_bound(byte);
  return next != pinned().begin() && byte < std::prev(next)->first + std::prev(next)->second;
}
struct HostAllocator final : at::HostAllocator {
  static void free(void* data) {
    const Locked locked(lock());
    pinned().erase(static_cast<char*>(data));
    std::free(data);
  }
  c10::DataPtr allocate(size_t bytes) override {
    const Locked locked(lock());
    size_t size = kGranule;
    while (size < bytes) size *= 2;
    auto* data = static_cast<char*>(std::aligned_alloc(kGranule, size));
    pinned()[data] = size;
    return {data, data, &free, c10::DeviceType::CPU};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
  bool record_event(void*, void*, c10::Stream) override { return true; }  // copies hold the memory until they ran
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};
inline HostAllocator& host_allocator() {
  static auto* one = new HostAllocator;
  return *one;
}

// ---- A tensor of the device as one of the CPU

inline char* data_of(const at::Tensor& tensor) {  // where a device would read or write what is not there, an error
  const auto& storage = tensor.storage();
  const size_t end = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize(), tensor.storage_offset());
  auto* data = static_cast<char*>(const_cast<void*>(storage.data()));
  TORCH_CHECK(tensor.numel() == 0 || (data != nullptr && end <= storage.nbytes()), "fake: illegal memory access at byte ", end,
              " of ", storage.nbytes());
  return data;
}
inline c10::Storage storage_on_cpu(const at::Tensor& tensor) {
  c10::DataPtr data(data_of(tensor), c10::Device(c10::kCPU));
  return {c10::Storage::use_byte_size_t(), tensor.storage().nbytes(), std::move(data), c10::GetAllocator(c10::kCPU), true};
}
inline at::Tensor alias_of(const at::Tensor& tensor, const c10::Storage& storage, c10::DispatchKeySet keys) {
  auto alias = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), keys, tensor.dtype());
  auto* impl = alias.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  impl->_set_conj(tensor.is_conj());
  impl->_set_neg(tensor.is_neg());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return alias;
}
inline at::Tensor on_cpu(const at::Tensor& tensor, std::optional<c10::Storage> storage = {}) {
  data_of(tensor);
  return alias_of(tensor, storage ? *storage : storage_on_cpu(tensor), c10::DispatchKeySet(c10::DispatchKey::CPU));
}
inline at::Tensor to_device(const at::Tensor& result) {
  const at::Tensor made = at::detail::empty_strided_generic(result.sizes(), result.strides(), &allocator(), kKeys, result.scalar_type());
  if (result.numel() > 0) std::memcpy(data_of(made), result.data_ptr(), made.storage().nbytes());
  made.unsafeGetTensorImpl()->_set_conj(result.is_conj());
  made.unsafeGetTensorImpl()->_set_neg(result.is_neg());
  return made;
}
inline void note_use(const std::string& what, const at::Tensor& tensor, const Use& use, bool is_write) {
  auto* block = static_cast<Block*>(tensor.storage().data_ptr().get_context());
  if (block != nullptr) block->uses.add(what, use, is_write);
}

// ---- Any operator

class Workspace {  // cuBLAS keeps one a thread and stream from its first product on (32 MiB on Hopper); cuDNN takes one at each call
 public:
  Workspace(const std::string& name, int index, size_t bytes) {
    static const auto size = static_cast<size_t>(setting("FAKE_BLAS_WORKSPACE", 32 << 20));
    static auto* kept = new std::map<std::pair<std::thread::id, int>, c10::DataPtr>;
    const Locked locked(lock());
    if (name == "aten::mm" || name == "aten::addmm" || name == "aten::bmm" || name == "aten::baddbmm") {
      auto& own = (*kept)[{std::this_thread::get_id(), current_stream(index)}];
      if (!own && size > 0) own = allocator().allocate(size);
    } else if (name.starts_with("aten::convolution")) {
      own_ = allocator().allocate(bytes);
    }
  }

 private:
  c10::DataPtr own_;
};

class Call {  // one operator's: takes its arguments to the CPU, and its results back
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : op_(op), name_(op.schema().name()), stack_(*stack), first_(stack->size() - op.schema().arguments().size()) {}

  void run() {
    for (size_t i = 0; i < op_.schema().arguments().size(); ++i) {
      const auto* alias = op_.schema().arguments()[i].alias_info();
      take_to_cpu(stack_[first_ + i], alias != nullptr && alias->isWrite());
    }
    // On CUDA an index may be of the CPU, which takes a copy.
    const bool takes_others = name_.starts_with("aten::index") || name_.starts_with("aten::_index_put");
    TORCH_CHECK(!has_foreign_ || index_ < 0 || takes_others, "Expected all tensors to be on the same device, but found at least two "
                "devices, fake:", index_, " and cpu! (", name_, ")");
    if (index_ < 0) index_ = current_device();
    const c10::DeviceGuard guard(c10::Device(kType, static_cast<c10::DeviceIndex>(index_)));
    note_uses();
    compute();
    for (const auto& lent : lent_) take_resized(lent);
    for (size_t i = stack_.size() - op_.schema().returns().size(); i < stack_.size(); ++i) take_to_device(stack_[i]);
  }

 private:
  struct Lent {
    at::Tensor tensor, view;
    bool is_written;
  };
  const c10::OperatorHandle& op_;
  const std::string& name_;
  torch::jit::Stack& stack_;
  const size_t first_;
  int index_ = -1;
  bool has_foreign_ = false;
  std::vector<Lent> lent_;
  std::map<c10::StorageImpl*, c10::Storage> storages_;  // on the CPU, one for each on the device
  std::optional<at::Generator> generator_;

  at::Tensor lend(const at::Tensor& tensor, bool is_written) {
    if (!is_ours(tensor)) {
      has_foreign_ |= tensor.defined() && tensor.dim() > 0;
      return tensor;
    }
    TORCH_CHECK(tensor.layout() == c10::kStrided, name_, ": no ", tensor.layout(), " tensors on a fake device");
    TORCH_CHECK(index_ < 0 || index_ == tensor.device().index(), "Expected all tensors to be on the same device, but found at "
                "least two devices, fake:", index_, " and ", tensor.device(), "! (", name_, ")");
    index_ = tensor.device().index();
    auto [place, is_new] = storages_.try_emplace(tensor.storage().unsafeGetStorageImpl());
    if (is_new) place->second = storage_on_cpu(tensor);
    lent_.push_back({tensor, on_cpu(tensor, place->second), is_written});
    return lent_.back().view;
  }

  void take_to_cpu(c10::IValue& value, bool is_written) {
    if (value.isTensor()) {
      value = lend(value.toTensor(), is_written);
    } else if (value.isTensorList()) {
      auto tensors = value.toTensorVector();
      for (auto& tensor : tensors) tensor = lend(tensor, is_written);
      value = tensors;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> tensors;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList())
        tensors.push_back(tensor ? std::optional(lend(*tensor, is_written)) : std::nullopt);
      value = tensors;
    } else if (value.isDevice() && value.toDevice().type() == kType) {
      if (index_ < 0 && value.toDevice().has_index()) index_ = value.toDevice().index();
      value = c10::Device(c10::kCPU);
    } else if (value.isGenerator() && value.toGenerator().device().type() == kType) {
      generator_ = value.toGenerator();
      value = c10::IValue();
    }
  }

  void note_uses() {
    const Locked locked(lock());
    const int stream = current_stream(index_);
    const Use use{stream, begin_kernel(stream)};
    for (const auto& lent : lent_) note_use(name_, lent.tensor, use, lent.is_written);
  }

  void compute() {
    const Workspace workspace(name_, index_, lent_.empty() ? 0 : lent_[0].tensor.nbytes());
    std::optional<Draw> draw;
    if (generator_ || op_.hasTag(at::Tag::nondeterministic_seeded)) draw.emplace(generator_ ? *generator_ : default_generator(index_));
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const c10::DispatchKeySet cpu(c10::DispatchKey::CPU);
    if (name_ == "aten::convolution_overrideable") {
      op_of("aten::convolution").redispatchBoxed(cpu, &stack_);
    } else if (name_ == "aten::convolution_backward_overrideable") {  // which is not told the size of the bias
      const auto weight = stack_[first_ + 2].toTensor();
      const bool is_transposed = stack_[first_ + 6].toBool();
      const int64_t channels = is_transposed ? weight.size(1) * stack_[first_ + 8].toInt() : weight.size(0);
      stack_.insert(stack_.begin() + static_cast<int64_t>(first_) + 3, c10::IValue(std::vector<int64_t>{channels}));
      op_of("aten::convolution_backward").redispatchBoxed(cpu, &stack_);
    } else {
      op_.redispatchBoxed(cpu, &stack_);
    }
  }
  static c10::OperatorHandle op_of(const char* name) { return c10::Dispatcher::singleton().findSchemaOrThrow(name, ""); }

  static void take_resized(const Lent& lent) {  // an output that was given, and was too small
    const auto& [tensor, view, is_written] = lent;
    if (!is_written || (view.sizes() == tensor.sizes() && view.storage().data() == tensor.storage().data())) return;
    at::native::resize_(tensor, view.sizes());
    if (view.numel() > 0) std::memcpy(data_of(tensor), view.data_ptr(), view.nbytes());
  }

  void take_to_device(c10::IValue& value) {
    if (value.isTensor()) {
      value = returned(value.toTensor());
    } else if (value.isTensorList()) {
      auto tensors = value.toTensorVector();
      for (auto& tensor : tensors) tensor = returned(tensor);
      value = tensors;
    }
  }

  at::Tensor returned(const at::Tensor& result) const {
    if (!result.defined()) return result;
    for (const auto& [tensor, view, is_written] : lent_) {
      if (result.unsafeGetTensorImpl() == view.unsafeGetTensorImpl()) return tensor;
      const bool is_same = result.has_storage() && result.storage().unsafeGetStorageImpl() == view.storage().unsafeGetStorageImpl();
      if (is_same) return alias_of(result, tensor.storage(), kKeys);
    }
    return to_device(result);
  }
};

inline void any_operator(const c10::OperatorHandle& op, torch::jit::Stack* stack) { Call(op, stack).run(); }

// ---- Operators that make, move or look at memory

inline at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                        std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(size, &allocator(), kKeys, c10::dtype_or_default(dtype), format);
}
inline at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                                std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_strided_generic(size, stride, &allocator(), kKeys, c10::dtype_or_default(dtype));
}

inline void wait_for(int stream, int other) {
  const auto event = std::make_shared<Event>();
  record(event, other);
  stream_waits(stream, event);
}

// Between devices both streams wait, as on CUDA. From or to the host: the host waits, unless it was said not to and the memory of the host is pinned, or is read first.
inline at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const Locked locked(lock());
  const auto& ours = is_ours(from) ? from : to;
  const auto& host = is_ours(from) ? to : from;
  const bool with_host = !is_ours(host), to_host = with_host && is_ours(from);
  const int stream = current_stream(ours.device().index());
  const bool between_devices = is_ours(from) && is_ours(to) && from.device() != to.device();
  if (between_devices) wait_for(stream, current_stream(to.device().index()));
  const bool is_plain = from.sizes() == to.sizes() && from.strides() == to.strides() && from.dtype() == to.dtype() &&
                        from.is_non_overlapping_and_dense() && from.is_conj() == to.is_conj() && from.is_neg() == to.is_neg();
  const bool waits = with_host && !(non_blocking && (!to_host || is_pinned(host.data_ptr())));
  uint64_t number;
  if (with_host && is_plain && !waits) {
    data_of(ours);
    const size_t bytes = from.nbytes();
    auto *source = static_cast<char*>(from.data_ptr()), *target = static_cast<char*>(to.data_ptr());
    std::shared_ptr<std::vector<char>> read;
    if (!to_host && !is_pinned(source)) {
      read = std::make_shared<std::vector<char>>(source, source + bytes);
      source = read->data();
    }
    if (to_host) std::memset(target, kPoison, bytes);
    const c10::Storage kept = is_pinned(host.data_ptr()) ? host.storage() : c10::Storage();
    number = give(stream, [target, source, bytes, read, kept] { std::memcpy(target, source, bytes); });
  } else {
    number = begin_kernel(stream);
    const at::AutoDispatchBelowADInplaceOrView below;
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    (is_ours(to) ? on_cpu(to) : to).copy_(is_ours(from) ? on_cpu(from) : from);
    if (waits) host_waits_for_stream(stream);
  }
  if (is_ours(from)) note_use("aten::copy_", from, {stream, number}, false);
  if (is_ours(to)) note_use("aten::copy_", to, {stream, number}, true);
  if (between_devices) wait_for(current_stream(to.device().index()), stream);
  return to;
}
inline at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  at::native::resize_(to, from.sizes());
  return copy_from(from, to, false);
}
inline at::Scalar item(const at::Tensor& tensor) {
  const Locked locked(lock());
  const int stream = current_stream(tensor.device().index());
  note_use("aten::item", tensor, {stream, begin_kernel(stream)}, false);
  host_waits_for_stream(stream);
  return on_cpu(tensor).item();
}
inline void resize_storage(const c10::Storage& storage, size_t bytes) {
  const c10::DeviceGuard guard(storage.device());
  auto data = allocator().allocate(bytes);
  if (const size_t common = std::min(bytes, storage.nbytes()); common > 0) {
    const Locked locked(lock());
    const int stream = current_stream(storage.device().index());
    const Use use{stream, begin_kernel(stream)};
    static_cast<Block*>(storage.data_ptr().get_context())->uses.add("resize_", use, false);
    static_cast<Block*>(data.get_context())->uses.add("resize_", use, true);
    std::memcpy(data.get(), storage.data(), common);
  }
  storage.set_data_ptr_noswap(std::move(data));
  storage.set_nbytes(bytes);
}

// ---- What modules call on any accelerator, and the CPU has no kernel for

inline int64_t choice_of_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                                   const std::optional<at::Tensor>& mask, double dropout, bool is_causal, std::optional<double> scale, bool gqa) {
  if (query.scalar_type() == at::kHalf) return 0;  // the CPU's fused kernel has no backward for it
  auto view = [](const at::Tensor& tensor) {  // nobody looks at values, which need not be there
    c10::Storage storage(c10::Storage::use_byte_size_t(), tensor.storage().nbytes(), c10::DataPtr(nullptr, c10::Device(c10::kCPU)));
    return alias_of(tensor, storage, c10::DispatchKeySet(c10::DispatchKey::CPU));
  };
  const auto seen = mask && mask->defined() ? std::optional(view(*mask)) : std::nullopt;
  return at::_fused_sdp_choice(view(query), view(key), view(value), seen, dropout, is_causal, scale, gqa);
}
inline at::Tensor histc(const at::Tensor& values, int64_t bins, const at::Scalar& least, const at::Scalar& most) {
  return to_device(at::histc(on_cpu(values).to(at::kDouble), bins, least, most).to(values.scalar_type()));
}
inline std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell(const at::Tensor& of_input, const at::Tensor& of_hidden, const at::Tensor& c,
                                                                const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& other) {
  auto sums = of_input + of_hidden;
  for (const auto* one : {&bias, &other})
    if (*one && (*one)->defined()) sums = sums + **one;
  const auto parts = sums.chunk(4, 1);
  const auto in = parts[0].sigmoid(), forget = parts[1].sigmoid(), cell = parts[2].tanh(), out = parts[3].sigmoid();
  const auto next = forget * c + in * cell;
  return {out * next.tanh(), next, at::cat({in, forget, cell, out}, 1)};
}
inline std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell_backward(const std::optional<at::Tensor>& of_h, const std::optional<at::Tensor>& of_c,
                                                                         const at::Tensor& c, const at::Tensor& next, const at::Tensor& gates, bool bias) {
  const auto parts = gates.chunk(4, 1);
  const auto in = parts[0], forget = parts[1], cell = parts[2], out = parts[3], bent = next.tanh();
  auto d_next = of_c && of_c->defined() ? *of_c : at::zeros_like(next);
  auto d_out = at::zeros_like(next);
  if (of_h && of_h->defined()) {
    d_next = d_next + *of_h * out * (1 - bent * bent);
    d_out = *of_h * bent;
  }
  const auto d_sums = at::cat({d_next * cell * in * (1 - in), d_next * c * forget * (1 - forget), d_next * in * (1 - cell * cell),
                               d_out * out * (1 - out)}, 1);
  return {d_sums, d_next * forget, bias ? d_sums.sum(0) : at::Tensor()};
}
inline std::tuple<at::Tensor, at::Tensor> gru_cell(const at::Tensor& of_input, const at::Tensor& of_hidden, const at::Tensor& h,
                                                   const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& other) {
  auto gates = [](const at::Tensor& sums, const std::optional<at::Tensor>& one) {
    return (one && one->defined() ? sums + *one : sums).chunk(3, 1);
  };
  const auto in = gates(of_input, bias), hidden = gates(of_hidden, other);
  const auto reset = (in[0] + hidden[0]).sigmoid(), update = (in[1] + hidden[1]).sigmoid();
  const auto fresh = (in[2] + reset * hidden[2]).tanh();
  return {fresh + update * (h - fresh), at::cat({reset, update, fresh, h, hidden[2]}, 1)};
}
inline std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> gru_cell_backward(const at::Tensor& of_h, const at::Tensor& workspace,
                                                                                              bool bias) {
  const auto parts = workspace.chunk(5, 1);
  const auto reset = parts[0], update = parts[1], fresh = parts[2];
  const auto d_fresh = of_h * (1 - update) * (1 - fresh * fresh);
  const auto d_update = of_h * (parts[3] - fresh) * update * (1 - update), d_reset = d_fresh * parts[4] * reset * (1 - reset);
  const auto d_in = at::cat({d_reset, d_update, d_fresh}, 1), d_hidden = at::cat({d_reset, d_update, d_fresh * reset}, 1);
  return {d_in, d_hidden, of_h * update, bias ? d_in.sum(0) : at::Tensor(), bias ? d_hidden.sum(0) : at::Tensor()};
}

}  // namespace fake
