// Whether dicts of Python still hold the same objects: one call for all of them, by a function of Python's C API.
#include <cstdint>

// The caller holds the lock of the interpreter; what `get` returns is compared, and never read.
extern "C" int hold_same(void* (*get)(void*, void*), void* const* dicts, void* const* keys, void* const* values,
                         int64_t count) {
    for (int64_t i = 0; i < count; i++)
        if (get(dicts[i], keys[i]) != values[i]) return 0;
    return 1;
}
