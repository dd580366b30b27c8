// Zeros for the pruned blocks of a window, stored past the caches: nothing is read, and nothing else is written.
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace {

// A whole cache line of zeros, straight to memory.
void zero_line(char* line) {
#ifdef __AVX__
    _mm256_stream_si256(reinterpret_cast<__m256i*>(line), _mm256_setzero_si256());
    _mm256_stream_si256(reinterpret_cast<__m256i*>(line + 32), _mm256_setzero_si256());
#else
    for (int part = 0; part < 64; part += 16) {
        _mm_stream_si128(reinterpret_cast<__m128i*>(line + part), _mm_setzero_si128());
    }
#endif
}

// Ends that fill no line are written as usual.
void zero(char* begin, int64_t bytes) {
    int64_t head = -reinterpret_cast<intptr_t>(begin) & 63;
    if (bytes < head + 64) {
        std::memset(begin, 0, bytes);
        return;
    }
    if (head) std::memset(begin, 0, head);
    int64_t at = head;
    for (; at + 64 <= bytes; at += 64) zero_line(begin + at);
    if (at < bytes) std::memset(begin + at, 0, bytes - at);
}

}  // namespace

// A pair of dimensions of the window: blocks and their elements, with strides in bytes, and the stride of the mask.
struct Pair {
    int64_t blocks, elements, block_stride, element_stride, mask_stride;
};

// The last pair lies along memory: each of its blocks is one run of bytes.
extern "C" void fill(char* window, const uint8_t* mask, const Pair* pairs, int64_t count, int64_t bytes, int threads) {
    const Pair last = pairs[count - 1];
    int64_t rows = 1;
    for (int64_t d = 0; d < count - 1; d++) rows *= pairs[d].blocks * pairs[d].elements;
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (int64_t row = 0; row < rows; row++) {
            char* weights = window;
            const uint8_t* pruned = mask;
            int64_t rest = row;
            for (int64_t d = count - 2; d >= 0; d--) {
                const int64_t element = rest % pairs[d].elements;
                rest /= pairs[d].elements;
                const int64_t block = rest % pairs[d].blocks;
                rest /= pairs[d].blocks;
                weights += block * pairs[d].block_stride + element * pairs[d].element_stride;
                pruned += block * pairs[d].mask_stride;
            }
            for (int64_t block = 0; block < last.blocks; block++) {
                if (pruned[block * last.mask_stride]) zero(weights + block * last.block_stride, bytes);
            }
        }
        _mm_sfence();  // what this thread has stored is seen before anything that comes after
    }
}
