/* A device for tests, where whatever an accelerator would forgive or wait for is seen.

   Its memory is that of the host under addresses that no host code can read (a read of one is a segmentation fault),
   and every operation is done by the CPU on the same memory. So results are those of the CPU, while

   - tensors of the device and of the CPU cannot meet in one operation, unless the latter has no dimensions, nor in one
     list, whatever their dimensions;
   - everything that would wait is counted: a number that is read, a copy to the host, a copy from it that is not
     asked to be non-blocking, a result whose shape depends on values, a synchronization;
   - random numbers come from a generator of its own.                                                              */

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <set>

namespace {

const c10::Device DEVICE(c10::DeviceType::PrivateUse1, 0);
const c10::DispatchKeySet KEYS(c10::DispatchKey::PrivateUse1);
const uintptr_t OFFSET = uintptr_t(1) << 62; /* no address of the host's is so large */

int64_t waits = 0;
std::string last_wait;
bool available = false;

void wait_for(const std::string& what)
{
    waits++;
    last_wait = what;
}

void* shifted(void* data, uintptr_t by) { return data ? (void*)((uintptr_t)data + by) : data; }

struct Memory final : c10::Allocator {
    c10::DataPtr allocate(size_t bytes) override
    {
        c10::DataPtr host = c10::GetCPUAllocator()->allocate(bytes);
        void* data = host.get();
        const auto free = host.get_deleter();
        return {shifted(data, OFFSET), host.release_context(), free, DEVICE};
    }
    c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
    void copy_data(void* to, const void* from, size_t bytes) const override
    {
        std::memcpy(shifted(to, -OFFSET), shifted((void*)from, -OFFSET), bytes);
    }
} memory;

at::Generator& generator()
{
    static at::Generator its = at::detail::createCPUGenerator(0);
    return its;
}

bool is_ours(const at::Tensor& t) { return t.defined() && t.device().type() == DEVICE.type(); }

/* The same memory as a tensor of the host's. */
at::Tensor on_host(const at::Tensor& t)
{
    if (!is_ours(t))
        return t;
    const c10::Storage& its = t.storage();
    c10::DataPtr data(shifted((void*)its.data(), -OFFSET), c10::kCPU);
    c10::Storage storage(c10::Storage::use_byte_size_t(), its.nbytes(), std::move(data), c10::GetCPUAllocator(), true);
    at::Tensor host = at::detail::make_tensor<c10::TensorImpl>(
        std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), t.dtype());
    host.unsafeGetTensorImpl()->set_storage_offset(t.storage_offset());
    host.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides());
    return host;
}

/* What an operation is given and what it makes of it: tensors of ours, each with the host's view of it. */
struct Call {
    std::string name;
    std::vector<std::pair<at::Tensor, at::Tensor>> seen;

    at::Tensor given(const at::Tensor& t)
    {
        const bool index = name.rfind("aten::index", 0) == 0 || name.rfind("aten::_index", 0) == 0;
        if (name == "aten::_index_put_impl_" && is_ours(t) && t.scalar_type() == at::kBool)
            wait_for(name + " by a mask");
        if (!is_ours(t)) {
            TORCH_CHECK(index || !t.defined() || t.dim() == 0, name, ": expected all tensors on ", DEVICE,
                        ", but one of shape ", t.sizes(), " is on ", t.device());
            return t;
        }
        seen.emplace_back(t, on_host(t));
        return seen.back().second;
    }

    /* A tensor that was given, as it was; a view of one, as a view of ours; else a copy in our memory. */
    at::Tensor returned(const at::Tensor& result)
    {
        if (!result.defined())
            return result;
        for (auto& [ours, host] : seen)
            if (host.is_same(result))
                return ours;
        for (auto& [ours, host] : seen)
            if (host.storage().is_alias_of(result.storage())) {
                at::Tensor view = at::detail::make_tensor<c10::TensorImpl>(
                    c10::TensorImpl::VIEW, c10::Storage(ours.storage()), ours.key_set(), result.dtype());
                view.unsafeGetTensorImpl()->set_storage_offset(result.storage_offset());
                view.unsafeGetTensorImpl()->set_sizes_and_strides(result.sizes(), result.strides());
                return view;
            }
        at::Tensor copy = at::empty_strided(result.sizes(), result.strides(), result.options().device(DEVICE));
        on_host(copy).copy_(result);
        return copy;
    }

    /* A tensor that the operation made larger has other memory now. */
    void take_over_sizes()
    {
        for (auto& [ours, host] : seen) {
            auto* impl = ours.unsafeGetTensorImpl();
            if (host.storage().nbytes() > ours.storage().nbytes()) {
                const size_t bytes = host.storage().nbytes();
                c10::DataPtr larger = memory.allocate(bytes);
                memory.copy_data(larger.get(), shifted(host.storage().mutable_data(), OFFSET), bytes);
                ours.storage().set_data_ptr(std::move(larger));
                ours.storage().set_nbytes(bytes);
            }
            if (host.sizes() != ours.sizes() || host.strides() != ours.strides())
                impl->set_sizes_and_strides(host.sizes(), host.strides());
        }
    }
};

const std::set<std::string> SHAPED_BY_VALUES = {
    "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
    "aten::bincount"};

void run(const c10::OperatorHandle& op, torch::jit::Stack* stack)
{
    const auto& schema = op.schema();
    Call call{schema.name(), {}};
    const size_t count = schema.arguments().size();
    for (size_t i = 0; i < count; i++) {
        c10::IValue& value = (*stack)[stack->size() - count + i];
        if (value.isTensor())
            value = call.given(value.toTensor());
        else if (value.isTensorList()) {
            auto list = value.toTensorVector();
            bool ours = false, others = false;
            for (at::Tensor& t : list)
                (is_ours(t) ? ours : others) = true;
            TORCH_CHECK(!(ours && others), schema.name(), ": a list has tensors on several devices");
            for (at::Tensor& t : list)
                t = call.given(t);
            value = c10::IValue(list);
        } else if (value.isOptionalTensorList()) {
            c10::List<std::optional<at::Tensor>> list;
            for (const std::optional<at::Tensor>& t : value.toOptionalTensorVector())
                list.push_back(t ? std::optional<at::Tensor>(call.given(*t)) : t);
            value = c10::IValue(list);
        } else if (value.isDevice())
            value = c10::IValue(c10::Device(c10::kCPU));
        else if (value.isGenerator() || (value.isNone() && schema.arguments()[i].name() == "generator"))
            value = c10::IValue(generator());
    }
    {
        /* It draws numbers, but cannot be told from where. */
        const bool draws = schema.name() == "aten::native_dropout";
        at::Generator hosts = at::detail::getDefaultCPUGenerator();
        const at::Tensor kept = draws ? hosts.get_state() : at::Tensor();
        if (draws)
            hosts.set_state(generator().get_state());
        op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
        if (draws) {
            generator().set_state(hosts.get_state());
            hosts.set_state(kept);
        }
    }
    call.take_over_sizes();
    bool waited = SHAPED_BY_VALUES.count(schema.name());
    const size_t results = schema.returns().size();
    for (size_t i = 0; i < results; i++) {
        c10::IValue& value = (*stack)[stack->size() - results + i];
        if (value.isTensor())
            value = call.returned(value.toTensor());
        else if (value.isTensorList()) {
            auto list = value.toTensorVector();
            for (at::Tensor& t : list)
                t = call.returned(t);
            value = c10::IValue(list);
        } else
            waited = true;
    }
    if (waited)
        wait_for(schema.name());
}

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format)
{
    return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &memory, KEYS, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>)
{
    return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &memory,
                                             KEYS, c10::dtype_or_default(dtype));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking)
{
    if (!is_ours(to))
        wait_for("copy to the host");
    else if (!is_ours(from) && !non_blocking)
        wait_for("copy from the host");
    on_host(to).copy_(on_host(from));
    return to;
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
    c10::DeviceType type() const override { return DEVICE.type(); }
    c10::Device exchangeDevice(c10::Device) const override { return DEVICE; }
    c10::Device getDevice() const override { return DEVICE; }
    void setDevice(c10::Device) const override {}
    void uncheckedSetDevice(c10::Device) const noexcept override {}
    c10::Stream getStream(c10::Device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, DEVICE); }
    c10::Stream getNewStream(c10::Device, int) const override { return c10::Stream(c10::Stream::DEFAULT, DEVICE); }
    c10::Stream exchangeStream(c10::Stream) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, DEVICE); }
    c10::DeviceIndex deviceCount() const noexcept override { return 1; }
    void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
    void block(void*, const c10::Stream&) const override {}
    bool queryEvent(void*) const override { return true; }
    void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
    bool queryStream(const c10::Stream&) const override { return true; }
    void synchronizeStream(const c10::Stream&) const override { wait_for("synchronize"); }
    void synchronizeDevice(const c10::DeviceIndex) const override { wait_for("synchronize"); }
};

struct Hooks final : at::PrivateUse1HooksInterface {
    bool isBuilt() const { return true; }
    bool isAvailable() const { return available; }
    bool hasPrimaryContext(c10::DeviceIndex) const override { return available; }
    const at::Generator& getDefaultGenerator(c10::DeviceIndex) const { return generator(); }
    at::Generator getNewGenerator(c10::DeviceIndex) const { return at::detail::createCPUGenerator(0); }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m)
{
    m.impl("empty.memory_format", empty);
    m.impl("empty_strided", empty_strided);
    m.impl("_copy_from", copy_from);
    /* Those for lists, which else would be taken apart, and mixed lists with them. */
    for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames())
        if (name.name.rfind("aten::_foreach_", 0) == 0)
            m.impl(toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&run>());
}

TORCH_LIBRARY(strict, m)
{
    static Hooks hooks;
    at::RegisterPrivateUse1HooksInterface(&hooks);
    c10::SetAllocator(DEVICE.type(), &memory);
    m.def("waits", []() { return waits; });
    m.def("last_wait", []() { return last_wait; });
    m.def("reset", []() { waits = 0; });
    m.def("set_available", [](bool yes) { available = yes; });
    m.def("rng_state", []() { return generator().get_state(); });
    m.def("set_rng_state", [](const at::Tensor& state) { generator().set_state(state); });
    m.def("seed", [](int64_t number) { generator().set_current_seed(number); });
}

} // namespace
