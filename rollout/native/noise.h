// Uniform numbers that belong to a token, see rollout/noise.py: Philox4x32-10 (Salmon, Moraes, Dror and Shaw,
// "Parallel random numbers: as easy as 1, 2, 3", 2011).
#pragma once

#include <cstdint>

// Whose draw it is; all but the seed are words of 32 bits.
struct Draw {
    int64_t seed, stream_lo, stream_hi, index, position;
};

static inline double uniform(const Draw& draw) {
    uint32_t words[4] = {uint32_t(draw.position), uint32_t(draw.index), uint32_t(draw.stream_lo),
                         uint32_t(draw.stream_hi)};
    uint32_t low = uint32_t(draw.seed), high = uint32_t(draw.seed >> 32);
    for (int round = 0; round < 10; round++) {
        const uint64_t even = uint64_t(words[0]) * 0xD2511F53u, odd = uint64_t(words[2]) * 0xCD9E8D57u;
        words[0] = uint32_t(odd >> 32) ^ words[1] ^ low;
        words[1] = uint32_t(odd);
        words[2] = uint32_t(even >> 32) ^ words[3] ^ high;
        words[3] = uint32_t(even);
        low += 0x9E3779B9u;
        high += 0xBB67AE85u;
    }
    // 27 + 26 bits fill the 53 bits of a double: no rounding, so never 1
    return double(uint64_t(words[0] >> 5) << 26 | words[1] >> 6) * 0x1p-53;
}
