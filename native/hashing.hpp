// XXH64: the one hash of recmill. Same on every engine and platform, and there is an implementation in every language.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace xxh64 {
constexpr uint64_t P1 = 0x9E3779B185EBCA87ull, P2 = 0xC2B2AE3D27D4EB4Full, P3 = 0x165667B19E3779F9ull,
                   P4 = 0x85EBCA77C2B2AE63ull, P5 = 0x27D4EB2F165667C5ull;

inline uint64_t rotate(uint64_t x, int by) { return (x << by) | (x >> (64 - by)); }
inline uint64_t read64(const char* p) { uint64_t v; std::memcpy(&v, p, 8); return v; }
inline uint64_t read32(const char* p) { uint32_t v; std::memcpy(&v, p, 4); return v; }
inline uint64_t round(uint64_t acc, uint64_t lane) { return rotate(acc + lane * P2, 31) * P1; }
inline uint64_t merge(uint64_t acc, uint64_t lane) { return (acc ^ round(0, lane)) * P1 + P4; }
inline uint64_t avalanche(uint64_t h) {
  h = (h ^ (h >> 33)) * P2;
  h = (h ^ (h >> 29)) * P3;
  return h ^ (h >> 32);
}

inline uint64_t of_int(uint64_t value, uint64_t seed) {
  uint64_t h = seed + P5 + 8;
  h = rotate(h ^ round(0, value), 27) * P1 + P4;
  return avalanche(h);
}

inline uint64_t of_bytes(const char* p, size_t length, uint64_t seed) {
  const char* end = p + length;
  uint64_t h;
  if (length >= 32) {
    uint64_t a = seed + P1 + P2, b = seed + P2, c = seed, d = seed - P1;
    for (; p + 32 <= end; p += 32) {
      a = round(a, read64(p));
      b = round(b, read64(p + 8));
      c = round(c, read64(p + 16));
      d = round(d, read64(p + 24));
    }
    h = rotate(a, 1) + rotate(b, 7) + rotate(c, 12) + rotate(d, 18);
    h = merge(merge(merge(merge(h, a), b), c), d);
  } else {
    h = seed + P5;
  }
  h += length;
  for (; p + 8 <= end; p += 8) h = rotate(h ^ round(0, read64(p)), 27) * P1 + P4;
  if (p + 4 <= end) {
    h = rotate(h ^ (read32(p) * P1), 23) * P2 + P3;
    p += 4;
  }
  for (; p < end; ++p) h = rotate(h ^ (static_cast<uint8_t>(*p) * P5), 11) * P1;
  return avalanche(h);
}
}  // namespace xxh64

// Slot of a hash in a table of any size, without a division.
inline size_t slot_of(uint64_t hash, size_t slots) {
  return static_cast<size_t>((static_cast<unsigned __int128>(hash) * slots) >> 64);
}
