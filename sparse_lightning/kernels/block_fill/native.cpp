// Zeros for the pruned blocks of many tensors in one call, by all threads together.
#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

// A pair of dimensions: blocks and their elements, with strides in bytes, and the stride of the mask.
struct Pair {
    int64_t blocks, elements, block_stride, element_stride, mask_stride;
};

// Blocks of one size in one tensor. A row is all that the last pair covers; `start` counts the bytes of all windows
// before this one, so that any number of bytes is found by a search.
struct Window {
    int64_t tensor, offset, mask, size, first, pairs, rows, row_bytes, start;
};

namespace {

constexpr int64_t LINE = 64, PAGE = 4096, AHEAD = 4 * PAGE;
constexpr int MOST_PAIRS = 32, MOST_LISTED = 512;

// Reads a line of each page that is written a little later: finding where pages lie takes longer than writing them, and
// stores wait for it one after another, prefetches do not. What lies outside of a tensor is never read.
inline void find_pages(const char* row, int64_t bytes) {
    for (int64_t byte = 0; byte < bytes; byte += PAGE) __builtin_prefetch(row + byte + AHEAD, 0, 0);
}

// A whole cache line of zeros, straight to memory.
inline void stream_line(char* line) {
#ifdef __AVX__
    _mm256_stream_si256(reinterpret_cast<__m256i*>(line), _mm256_setzero_si256());
    _mm256_stream_si256(reinterpret_cast<__m256i*>(line + 32), _mm256_setzero_si256());
#else
    for (int part = 0; part < LINE; part += 16) {
        _mm_stream_si128(reinterpret_cast<__m128i*>(line + part), _mm_setzero_si128());
    }
#endif
}

// Ends that fill no line are written as usual.
inline void zero(char* begin, int64_t bytes, bool stream) {
    const int64_t head = -reinterpret_cast<intptr_t>(begin) & (LINE - 1);
    if (!stream || bytes < head + LINE) {
        std::memset(begin, 0, bytes);
        return;
    }
    if (head) std::memset(begin, 0, head);
    int64_t at = head;
    for (; at + LINE <= bytes; at += LINE) stream_line(begin + at);
    if (at < bytes) std::memset(begin + at, 0, bytes - at);
}

// Short blocks side by side: every weight is ANDed with ones or zeros, without a branch on the mask.
template <typename T, int LENGTH>
void and_blocks(char* weights, const uint8_t* pruned, int64_t blocks) {
    T* at = reinterpret_cast<T*>(weights);
    for (int64_t block = 0; block < blocks; block++) {
        const T keep = static_cast<T>(pruned[block]) - 1;
        for (int i = 0; i < LENGTH; i++) at[block * LENGTH + i] &= keep;
    }
}

template <typename T>
bool and_row(char* weights, const uint8_t* pruned, int64_t blocks, int64_t length) {
    switch (length) {
        case 1: and_blocks<T, 1>(weights, pruned, blocks); return true;
        case 2: and_blocks<T, 2>(weights, pruned, blocks); return true;
        case 4: and_blocks<T, 4>(weights, pruned, blocks); return true;
        case 8: and_blocks<T, 8>(weights, pruned, blocks); return true;
        case 16: and_blocks<T, 16>(weights, pruned, blocks); return true;
        default: return false;
    }
}

bool and_row(char* weights, const uint8_t* pruned, const Pair& pair, int64_t size) {
    switch (size) {
        case 1: return and_row<uint8_t>(weights, pruned, pair.blocks, pair.elements);
        case 2: return and_row<uint16_t>(weights, pruned, pair.blocks, pair.elements);
        case 4: return and_row<uint32_t>(weights, pruned, pair.blocks, pair.elements);
        case 8: return and_row<uint64_t>(weights, pruned, pair.blocks, pair.elements);
        default: return false;
    }
}

// The few pruned blocks of a row, as of a matrix of which some columns are pruned: where its rows have the same values
// of the mask, they are found once, and each row is written to instead of read and written as a whole.
class FewPruned {
public:
    // Whether the row before had the same values of the mask, and one in eight of them or fewer are pruned.
    bool are_known(const uint8_t* pruned, int64_t blocks) {
        if (pruned != listed_) {
            count_ = pruned == last_ ? list(pruned, blocks) : MANY;
            listed_ = pruned == last_ ? pruned : nullptr;
            last_ = pruned;
        }
        return count_ != MANY;
    }

    void zero(char* row, int64_t bytes) const {
        switch (bytes) {
            case 2: return zero_of<2>(row);
            case 4: return zero_of<4>(row);
            case 8: return zero_of<8>(row);
            default:
                for (int64_t i = 0; i < count_; i++) std::memset(row + blocks_[i] * bytes, 0, bytes);
        }
    }

private:
    static constexpr int64_t MANY = -1;

    template <int BYTES>
    void zero_of(char* row) const {
        for (int64_t i = 0; i < count_; i++) std::memset(row + blocks_[i] * BYTES, 0, BYTES);
    }

    int64_t list(const uint8_t* pruned, int64_t blocks) {
        int64_t total = 0, count = 0;
        for (int64_t block = 0; block < blocks; block++) total += pruned[block];
        if (total > std::min<int64_t>(MOST_LISTED, blocks / 8)) return MANY;
        for (int64_t block = 0; count < total; block++) {
            if (pruned[block]) blocks_[count++] = block;
        }
        return total;
    }

    const uint8_t *last_ = nullptr, *listed_ = nullptr;
    int64_t count_ = MANY, blocks_[MOST_LISTED];
};

// The blocks of one row, by the fastest way that their strides allow.
void fill_row(char* weights, const uint8_t* pruned, const Pair& pair, int64_t size, bool stream, FewPruned& few) {
    const int64_t bytes = pair.elements * size;
    const bool solid = pair.elements == 1 || pair.element_stride == size;
    const bool adjacent = solid && (pair.blocks == 1 || pair.block_stride == bytes);
    if (adjacent && bytes < LINE && pair.mask_stride == 1) {
        if (few.are_known(pruned, pair.blocks)) return few.zero(weights, bytes);
        if (and_row(weights, pruned, pair, size)) return;
    }
    for (int64_t block = 0; block < pair.blocks; block++) {
        if (!pruned[block * pair.mask_stride]) continue;
        char* begin = weights + block * pair.block_stride;
        int64_t run = 1;
        while (adjacent && block + 1 < pair.blocks && pruned[(block + 1) * pair.mask_stride]) block++, run++;
        if (solid) {
            zero(begin, run * bytes, stream);
        } else {
            for (int64_t i = 0; i < pair.elements; i++) std::memset(begin + i * pair.element_stride, 0, size);
        }
    }
}

// Rows [from, to) of a window: the coordinates of the outer pairs are counted up like an odometer.
void fill_rows(char* weights, const uint8_t* mask, const Window& window, const Pair* pairs, int64_t from, int64_t to,
               bool stream) {
    const int outer = static_cast<int>(window.pairs) - 1;
    int64_t block[MOST_PAIRS], element[MOST_PAIRS];
    char* at = weights + window.offset;
    const uint8_t* pruned = mask + window.mask;
    int64_t rest = from;
    for (int d = outer - 1; d >= 0; d--) {
        element[d] = rest % pairs[d].elements, rest /= pairs[d].elements;
        block[d] = rest % pairs[d].blocks, rest /= pairs[d].blocks;
        at += block[d] * pairs[d].block_stride + element[d] * pairs[d].element_stride;
        pruned += block[d] * pairs[d].mask_stride;
    }
    FewPruned few;
    for (int64_t row = from; row < to; row++) {
        if (stream) find_pages(at, window.row_bytes);
        fill_row(at, pruned, pairs[outer], window.size, stream, few);
        for (int d = outer - 1; d >= 0; d--) {
            at += pairs[d].element_stride;
            if (++element[d] < pairs[d].elements) break;
            at -= pairs[d].elements * pairs[d].element_stride, element[d] = 0;
            at += pairs[d].block_stride, pruned += pairs[d].mask_stride;
            if (++block[d] < pairs[d].blocks) break;
            at -= pairs[d].blocks * pairs[d].block_stride, pruned -= pairs[d].blocks * pairs[d].mask_stride;
            block[d] = 0;
        }
    }
}

}  // namespace

// Zeros the blocks where the mask is 1. A tensor at address 0 is passed over. Bytes are divided evenly among threads,
// whatever windows they belong to.
extern "C" void fill(const int64_t* addresses, const Window* windows, int64_t count, const Pair* pairs,
                     const uint8_t* mask, int64_t total, int stream, int threads) {
#pragma omp parallel for schedule(static, 1) num_threads(threads) if (threads > 1)
    for (int thread = 0; thread < threads; thread++) {
        const int64_t begin = total * thread / threads, end = total * (thread + 1) / threads;
        const Window* window = std::upper_bound(windows, windows + count, begin,
                                                [](int64_t at, const Window& w) { return at < w.start; }) - 1;
        for (; window < windows + count && window->start < end; window++) {
            char* weights = reinterpret_cast<char*>(addresses[window->tensor]);
            if (!weights) continue;
            // The rows that begin within the bytes of this thread.
            const int64_t bytes = window->row_bytes;
            const int64_t from = std::max<int64_t>(0, (begin - window->start + bytes - 1) / bytes);
            const int64_t to = std::min(window->rows, (end - window->start + bytes - 1) / bytes);
            if (from < to) fill_rows(weights, mask, *window, pairs + window->first, from, to, stream);
        }
        if (stream) _mm_sfence();  // what this thread has stored is seen before anything that comes after
    }
}
