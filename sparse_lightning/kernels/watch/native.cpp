// How tensors lie in memory: noted once, and compared at every step, without a call of Python for each tensor.
#include <c10/core/TensorImpl.h>

#include <cstdint>

namespace {

c10::TensorImpl* tensor_at(int64_t address) { return reinterpret_cast<c10::TensorImpl*>(address); }

// Calls `take` with every number that a table of blocks depends on, until it returns false.
template <typename Take>
bool each_number(const c10::TensorImpl& tensor, Take take) {
    const auto device = tensor.device();
    bool same = take(static_cast<int64_t>(device.type())) && take(static_cast<int64_t>(device.index())) &&
                take(static_cast<int64_t>(tensor.itemsize())) && take(tensor.dim());
    for (int64_t d = 0; same && d < tensor.dim(); d++) same = take(tensor.size(d)) && take(tensor.stride(d));
    return same;
}

int64_t address_of(c10::TensorImpl& tensor) {
    return tensor.has_storage() && tensor.numel() ? reinterpret_cast<int64_t>(tensor.mutable_data()) : 0;
}

}  // namespace

// Notes how tensors lie; `noted` has room for 4 numbers for each of them and 2 for each dimension.
extern "C" void note(const int64_t* tensors, int64_t count, int64_t* noted, int64_t* addresses) {
    for (int64_t i = 0; i < count; i++) {
        each_number(*tensor_at(tensors[i]), [&](int64_t number) { return *noted++ = number, true; });
        addresses[i] = address_of(*tensor_at(tensors[i]));
    }
}

// Returns 2 if a tensor lies differently than noted, 1 if one has another address, which is written, otherwise 0.
extern "C" int look(const int64_t* tensors, int64_t count, const int64_t* noted, int64_t* addresses) {
    int found = 0;
    for (int64_t i = 0; i < count; i++) {
        auto& tensor = *tensor_at(tensors[i]);
        if (!each_number(tensor, [&](int64_t number) { return *noted++ == number; })) return 2;
        const int64_t address = address_of(tensor);
        if (address != addresses[i]) addresses[i] = address, found = 1;
    }
    return found;
}

// Tells autograd that the tensors were written to.
extern "C" void bump(const int64_t* tensors, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        auto& tensor = *tensor_at(tensors[i]);
        if (!tensor.is_inference()) tensor.bump_version();
    }
}
