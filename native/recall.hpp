// The recall stage of a request: nearest vectors, related items, popular items, and one list of all of them.
// Plain C++ over the arrays of a bundle; recall.cpp has what Python calls, recall_stress.cpp runs it under sanitizers.
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <string_view>
#include <utility>
#include <vector>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#endif

namespace recall {

// --- the best of many

// A score and an item as one number: greater is better, and of equal scores the smaller item. NaN is never among the best.
inline uint64_t key_of(float score, uint32_t item) {
  if (score != score) return 0;
  uint32_t bits;
  score += 0.0f;  // -0 and 0 are equal
  std::memcpy(&bits, &score, 4);
  bits = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return uint64_t{bits} << 32 | static_cast<uint32_t>(~item);
}
inline uint32_t item_of(uint64_t key) { return ~static_cast<uint32_t>(key); }
inline float score_of(uint64_t key) {
  uint32_t bits = static_cast<uint32_t>(key >> 32);
  bits = bits & 0x80000000u ? bits & 0x7FFFFFFFu : ~bits;
  float score;
  std::memcpy(&score, &bits, 4);
  return score;
}

// The k greatest keys of all that were pushed. Most are refused by one comparison with the k-th so far.
class Best {
 public:
  explicit Best(size_t k) : k_(k) { keys_.reserve(std::min<size_t>(2 * k + SLACK, 1 << 16)); }

  bool wants(uint64_t key) const { return key > least_ && k_; }
  // False only if no item of this score is wanted.
  bool may_want(float score) const { return score >= least_score_; }
  void push(uint64_t key) {
    if (!wants(key)) return;
    keys_.push_back(key);
    if (keys_.size() >= 2 * k_ + SLACK) shrink();
  }
  size_t size() const { return std::min(k_, keys_.size()); }

  // Best first.
  const std::vector<uint64_t>& sorted() {
    shrink();
    std::sort(keys_.begin(), keys_.end(), std::greater<>());
    return keys_;
  }
  const std::vector<uint64_t>& unsorted() {
    shrink();
    return keys_;
  }

 private:
  static constexpr size_t SLACK = 64;

  void shrink() {
    if (keys_.size() <= k_) return;
    std::nth_element(keys_.begin(), keys_.begin() + (k_ - 1), keys_.end(), std::greater<>());
    keys_.resize(k_);
    least_ = keys_[k_ - 1], least_score_ = score_of(least_);
  }

  size_t k_;
  uint64_t least_ = 0;
  float least_score_ = -std::numeric_limits<float>::infinity();
  std::vector<uint64_t> keys_;
};

// Which items may be shown: not those of `banned`, which is sorted, and only those of the mask, if there is one.
struct ItemFilter {
  const int64_t* banned = nullptr;
  size_t num_banned = 0;
  const uint8_t* allowed = nullptr;
  size_t num_allowed = 0;

  bool keeps(uint32_t item) const {
    if (allowed && (item >= num_allowed || !allowed[item])) return false;
    return !num_banned || !std::binary_search(banned, banned + num_banned, int64_t{item});
  }
};

// --- inner products

using Lanes = float __attribute__((vector_size(32)));
using Bits = int32_t __attribute__((vector_size(32)));
using Halves = int16_t __attribute__((vector_size(16)));
constexpr size_t LANES = 8, CHAINS = 4;  // sums that do not wait for each other

#define RECALL_INLINE __attribute__((always_inline)) inline

template <class Vector, class T>
RECALL_INLINE Vector load(const T* from) {
  Vector to;
  std::memcpy(&to, from, sizeof to);
  return to;
}
RECALL_INLINE float one_of(const float* from) { return *from; }
RECALL_INLINE Lanes lanes_of(const float* from) { return load<Lanes>(from); }
// A half float is a float with a smaller exponent: shifted into place, it is its value times 2^-112.
constexpr float HALF_SCALE = 0x1p112f;
RECALL_INLINE float one_of(const uint16_t* from) {
  const uint32_t bits = (uint32_t{*from} & 0x8000u) << 16 | (uint32_t{*from} & 0x7FFFu) << 13;
  return load<float>(&bits);
}
RECALL_INLINE Lanes lanes_of(const uint16_t* from) {
  const Bits wide = __builtin_convertvector(load<Halves>(from), Bits);  // the sign fills the bits above
  const Bits bits = (wide << 13) & static_cast<int32_t>(0x8FFFE000);
  return load<Lanes>(&bits);
}

// Where vectors lie: one behind the other, or those of some keys.
template <class T>
struct InOrder {
  const T* vectors;
  size_t dim;
  RECALL_INLINE const T* operator[](size_t i) const { return vectors + i * dim; }
};
struct OfKeys {
  const float* vectors;
  size_t dim;
  const uint64_t* keys;
  RECALL_INLINE const float* operator[](size_t i) const { return vectors + size_t{item_of(keys[i])} * dim; }
};

template <class T, class Where>
RECALL_INLINE void products_of(const T* /*of what*/, const float* query, Where vectors, size_t count, size_t dim, float* out) {
  constexpr size_t STEP = LANES * CHAINS;
  const size_t steps = dim / STEP * STEP, whole = dim / LANES * LANES;
  for (size_t i = 0; i < count; ++i) {
    const T* vector = vectors[i];
    Lanes sums[CHAINS] = {};
    for (size_t j = 0; j < steps; j += STEP)
      for (size_t c = 0; c < CHAINS; ++c) sums[c] += load<Lanes>(query + j + c * LANES) * lanes_of(vector + j + c * LANES);
    for (size_t j = steps; j < whole; j += LANES) sums[0] += load<Lanes>(query + j) * lanes_of(vector + j);
    const Lanes all = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    float sum = ((all[0] + all[1]) + (all[2] + all[3])) + ((all[4] + all[5]) + (all[6] + all[7]));
    for (size_t j = whole; j < dim; ++j) sum += query[j] * one_of(vector + j);
    out[i] = sum;
  }
}

#if defined(__x86_64__) && defined(__GNUC__)
#define RECALL_AVX2 __attribute__((target("avx2,fma"), always_inline)) inline
#define RECALL_AVX512 __attribute__((target("avx2,fma,avx512f"), always_inline)) inline

// Sums of the lanes of eight vectors each. Adding them one by one would take as long as the products.
RECALL_AVX2 __m256 sums_of_each(const __m256* of) {
  const __m256 low = _mm256_hadd_ps(_mm256_hadd_ps(of[0], of[1]), _mm256_hadd_ps(of[2], of[3]));
  const __m256 high = _mm256_hadd_ps(_mm256_hadd_ps(of[4], of[5]), _mm256_hadd_ps(of[6], of[7]));
  return _mm256_add_ps(_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31));
}

// One vector's products in eight lanes. All three builds add in the same order: 64 bytes are two chains.
struct Avx2 {
  RECALL_AVX2 static __m256 floats(const float* from) { return _mm256_loadu_ps(from); }
  RECALL_AVX2 static __m256 floats(const uint16_t* from) {
    const __m256i wide = _mm256_cvtepi16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    return _mm256_castsi256_ps(_mm256_and_si256(_mm256_slli_epi32(wide, 13), _mm256_set1_epi32(static_cast<int>(0x8FFFE000))));
  }
  template <class T>
  RECALL_AVX2 static __m256 lanes(const float* query, const T* vector, size_t steps, size_t whole) {
    __m256 a = _mm256_setzero_ps(), b = a, c = a, d = a;
    for (size_t j = 0; j < steps; j += 32) {
      a = _mm256_fmadd_ps(floats(query + j), floats(vector + j), a);
      b = _mm256_fmadd_ps(floats(query + j + 8), floats(vector + j + 8), b);
      c = _mm256_fmadd_ps(floats(query + j + 16), floats(vector + j + 16), c);
      d = _mm256_fmadd_ps(floats(query + j + 24), floats(vector + j + 24), d);
    }
    for (size_t j = steps; j < whole; j += 8) a = _mm256_fmadd_ps(floats(query + j), floats(vector + j), a);
    return _mm256_add_ps(_mm256_add_ps(a, b), _mm256_add_ps(c, d));
  }
};
struct Avx512 {
  RECALL_AVX512 static __m512 floats(const float* from) { return _mm512_loadu_ps(from); }
  RECALL_AVX512 static __m512 floats(const uint16_t* from) {
    const __m512i wide = _mm512_cvtepi16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_slli_epi32(wide, 13), _mm512_set1_epi32(static_cast<int>(0x8FFFE000))));
  }
  RECALL_AVX512 static __m256 folded(__m512 sums) {
    return _mm256_add_ps(_mm512_castps512_ps256(sums), _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(sums), 1)));
  }
  template <class T>
  RECALL_AVX512 static __m256 lanes(const float* query, const T* vector, size_t steps, size_t whole) {
    __m512 ab = _mm512_setzero_ps(), cd = ab;
    for (size_t j = 0; j < steps; j += 32) {
      ab = _mm512_fmadd_ps(floats(query + j), floats(vector + j), ab);
      cd = _mm512_fmadd_ps(floats(query + j + 16), floats(vector + j + 16), cd);
    }
    __m256 rest = _mm512_castps512_ps256(ab);
    for (size_t j = steps; j < whole; j += 8) rest = _mm256_fmadd_ps(Avx2::floats(query + j), Avx2::floats(vector + j), rest);
    ab = _mm512_castpd_ps(_mm512_insertf64x4(_mm512_castps_pd(ab), _mm256_castps_pd(rest), 0));
    return _mm256_add_ps(folded(ab), folded(cd));
  }
};

#define RECALL_PRODUCTS(name, Target, ...)                                                                            \
  template <class T, class Where>                                                                                     \
  __attribute__((target(__VA_ARGS__))) void name(const T*, const float* query, Where vectors, size_t count, size_t dim, float* out) { \
    const size_t steps = dim / 32 * 32, whole = dim / 8 * 8;                                                          \
    for (size_t start = 0; start < count; start += 8) {                                                               \
      const size_t size = count - start < 8 ? count - start : 8;                                                      \
      __m256 lanes[8];                                                                                                \
      for (size_t i = 0; i < 8; ++i) lanes[i] = Target::lanes(query, vectors[start + (i < size ? i : 0)], steps, whole); \
      float sums[8];                                                                                                  \
      _mm256_storeu_ps(sums, sums_of_each(lanes));                                                                    \
      for (size_t i = 0; i < size; ++i) {                                                                             \
        const T* vector = vectors[start + i];                                                                         \
        for (size_t j = whole; j < dim; ++j) sums[i] += query[j] * one_of(vector + j);                                \
        out[start + i] = sums[i];                                                                                     \
      }                                                                                                               \
    }                                                                                                                 \
  }
RECALL_PRODUCTS(products_by_avx2, Avx2, "avx2,fma")
RECALL_PRODUCTS(products_by_avx512, Avx512, "avx2,fma,avx512f")
#undef RECALL_PRODUCTS

enum class Simd { PLAIN, AVX2, AVX512 };
// What the CPU runs and RECMILL_SIMD allows.
inline Simd simd() {
  static const Simd chosen = [] {
    const char* given = std::getenv("RECMILL_SIMD");
    const std::string_view most = given ? given : "avx512";
    if (most == "plain" || !__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return Simd::PLAIN;
    return most == "avx2" || !__builtin_cpu_supports("avx512f") ? Simd::AVX2 : Simd::AVX512;
  }();
  return chosen;
}
#endif

// out[i] = query . vectors[i]. Of half floats, the query is given times HALF_SCALE.
template <class T, class Where>
inline void products_at(const T* type, const float* query, Where vectors, size_t count, size_t dim, float* out) {
#if defined(__x86_64__) && defined(__GNUC__)
  if (simd() == Simd::AVX512) return products_by_avx512(type, query, vectors, count, dim, out);
  if (simd() == Simd::AVX2) return products_by_avx2(type, query, vectors, count, dim, out);
#endif
  products_of(type, query, vectors, count, dim, out);
}
template <class T>
inline void products(const float* query, const T* vectors, size_t count, size_t dim, float* out) {
  products_at(vectors, query, InOrder<T>{vectors, dim}, count, dim, out);
}

// --- nearest vectors

// Vectors of items as an index was built of them, and what changed since: hidden ones, and others that count instead.
struct Vectors {
  const float* built = nullptr;  // [count][dim]
  size_t count = 0, dim = 0;
  const uint8_t* hidden = nullptr;
  const int64_t* changed_items = nullptr;
  const float* changed = nullptr;  // [num_changed][dim]
  size_t num_changed = 0;

  bool shows(uint32_t item, const ItemFilter& filter) const { return !(hidden && hidden[item]) && filter.keeps(item); }
};

constexpr size_t BLOCK = 256;

inline void push_changed(const Vectors& vectors, const float* query, const ItemFilter& filter, Best& best) {
  for (size_t i = 0; i < vectors.num_changed; ++i) {
    float score;
    products(query, vectors.changed + i * vectors.dim, 1, vectors.dim, &score);
    const uint64_t key = key_of(score, static_cast<uint32_t>(vectors.changed_items[i]));
    if (best.wants(key) && filter.keeps(item_of(key))) best.push(key);
  }
}

// The best k by a scan of every vector.
inline void search_all(const Vectors& vectors, const float* query, const ItemFilter& filter, Best& best) {
  float scores[BLOCK];
  for (size_t start = 0; start < vectors.count; start += BLOCK) {
    const size_t size = std::min(BLOCK, vectors.count - start);
    products(query, vectors.built + start * vectors.dim, size, vectors.dim, scores);
    for (size_t i = 0; i < size; ++i) {
      const uint64_t key = key_of(scores[i], static_cast<uint32_t>(start + i));
      if (best.wants(key) && vectors.shows(item_of(key), filter)) best.push(key);
    }
  }
  push_changed(vectors, query, filter, best);
}

// Items by cluster, in half floats.
struct Clusters {
  size_t dim = 0;
  std::vector<float> centers;  // [clusters][dim]
  std::vector<const uint16_t*> codes;
  std::vector<const int64_t*> items;
  std::vector<size_t> sizes;

  void scan(size_t cluster, const float* scaled_query, const Vectors& vectors, const ItemFilter& filter, Best& best) const {
    float scores[BLOCK];
    for (size_t start = 0; start < sizes[cluster]; start += BLOCK) {
      const size_t size = std::min(BLOCK, sizes[cluster] - start);
      products(scaled_query, codes[cluster] + start * dim, size, dim, scores);
      for (size_t i = 0; i < size; ++i) {
        if (!best.may_want(scores[i])) continue;  // most are refused before their item is read
        const auto item = static_cast<uint32_t>(items[cluster][start + i]);
        const uint64_t key = key_of(scores[i], item);
        if (best.wants(key) && item < vectors.count && vectors.shows(item, filter)) best.push(key);
      }
    }
  }

  // The clusters of the greatest inner products with a query: `number` of them.
  std::vector<uint64_t> nearest(const float* query, size_t number) const {
    float scores[BLOCK];
    Best best(number);
    for (size_t start = 0; start < sizes.size(); start += BLOCK) {
      const size_t size = std::min(BLOCK, sizes.size() - start);
      products(query, centers.data() + start * dim, size, dim, scores);
      for (size_t i = 0; i < size; ++i)
        if (best.may_want(scores[i])) best.push(key_of(scores[i], static_cast<uint32_t>(start + i)));
    }
    return best.sorted();
  }

  // Starts to load the head of a cluster, before which memory waits for nothing.
  void prefetch(size_t cluster) const {
    constexpr size_t LINE = 64, LINES = 16;
    const auto* bytes = reinterpret_cast<const char*>(codes[cluster]);
    for (size_t line = 0; line < std::min(LINES, sizes[cluster] * dim * 2 / LINE); ++line) __builtin_prefetch(bytes + line * LINE);
  }
};

// The best k of the nearest clusters: `probes` of them, or more if those have fewer than k items that may be shown.
// Chosen in half floats, somewhat more than k, and then compared by the vectors themselves.
inline void search_clusters(const Clusters& clusters, const Vectors& vectors, const float* query, size_t k, size_t probes,
                            const ItemFilter& filter, Best& best) {
  const size_t num_clusters = clusters.sizes.size(), dim = clusters.dim;
  std::vector<float> scaled(query, query + dim);
  for (float& value : scaled) {
    if (value != value) return;  // nothing is near NaN
    value *= HALF_SCALE;
  }
  Best rough(k + k / 8 + 16);
  const auto scan = [&](const std::vector<uint64_t>& order, size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      if (i + 1 < end) clusters.prefetch(item_of(order[i + 1]));
      clusters.scan(item_of(order[i]), scaled.data(), vectors, filter, rough);
    }
  };
  probes = std::min(probes, num_clusters);
  const std::vector<uint64_t> nearest = clusters.nearest(query, probes);
  scan(nearest, 0, nearest.size());
  if (rough.size() < k && probes < num_clusters) {
    const std::vector<uint64_t> all = clusters.nearest(query, num_clusters);
    for (size_t i = nearest.size(); i < all.size() && rough.size() < k; ++i) scan(all, i, i + 1);
  }
  const std::vector<uint64_t>& chosen = rough.unsorted();
  const OfKeys built{vectors.built, dim, chosen.data()};
  constexpr size_t AHEAD = 16, AT_ONCE = 8;
  float exact[AT_ONCE];
  for (size_t start = 0; start < chosen.size(); start += AT_ONCE) {
    const size_t size = std::min(AT_ONCE, chosen.size() - start);
    for (size_t i = start + AHEAD; i < std::min(start + AHEAD + AT_ONCE, chosen.size()); ++i)
      for (size_t j = 0; j < dim; j += 16) __builtin_prefetch(built[i] + j);
    products_at(vectors.built, query, OfKeys{vectors.built, dim, chosen.data() + start}, size, dim, exact);
    for (size_t i = 0; i < size; ++i) best.push(key_of(exact[i], item_of(chosen[start + i])));
  }
  push_changed(vectors, query, filter, best);
}

// --- small hash tables of items

// From items to slots 0, 1, 2, ... in the order in which they were first met; made anew for each use.
class ItemSlots {
 public:
  // Forgets everything; there is room for so many items.
  void reset(size_t most) {
    for (const size_t at : used_) entries_[at].slot = NONE;
    used_.clear();
    items.clear();
    size_t capacity = 64;
    while (capacity < 2 * most) capacity *= 2;
    if (entries_.size() < capacity) entries_.resize(capacity, Entry{0, NONE});
    mask_ = capacity - 1;
  }
  // The slot of an item, and whether it is new.
  std::pair<uint32_t, bool> add(uint32_t item) {
    size_t at = (item * 0x9E3779B97F4A7C15ull >> 32) & mask_;
    while (entries_[at].slot != NONE && entries_[at].item != item) at = (at + 1) & mask_;
    if (entries_[at].slot != NONE) return {entries_[at].slot, false};
    entries_[at] = Entry{item, static_cast<uint32_t>(items.size())};
    used_.push_back(at);
    items.push_back(item);
    return {entries_[at].slot, true};
  }

  std::vector<uint32_t> items;

 private:
  struct Entry { uint32_t item, slot; };
  static constexpr uint32_t NONE = 0xFFFFFFFFu;

  std::vector<Entry> entries_;
  std::vector<size_t> used_;
  size_t mask_ = 0;
};

// --- related items

// Neighbours of each row, best first, with their weights: those of row i are [offsets[i], offsets[i + 1]), up to a -1.
// Rows and neighbours are items by index or, of a model of some items, places in `items`, which ascends.
struct Neighbours {
  const int64_t* offsets;
  const int32_t* indices;
  const float* weights;
  size_t count;  // rows
  const int32_t* items = nullptr;

  uint32_t item_of_row(uint32_t row) const { return items ? static_cast<uint32_t>(items[row]) : row; }
};

// The items that add up to most over a profile: row p of it with weight w adds w times p's neighbours.
inline void related(const Neighbours& neighbours, const int32_t* profile, const float* profile_weights, size_t length,
                    const ItemFilter& filter, Best& best) {
  thread_local ItemSlots slots;
  thread_local std::vector<float> sums;
  size_t most = 0;
  for (size_t e = 0; e < length; ++e)
    most += static_cast<size_t>(neighbours.offsets[profile[e] + 1] - neighbours.offsets[profile[e]]);
  slots.reset(std::min(most, neighbours.count));
  sums.clear();
  for (size_t e = 0; e < length; ++e)
    for (int64_t j = neighbours.offsets[profile[e]]; j < neighbours.offsets[profile[e] + 1]; ++j) {
      const int32_t near = neighbours.indices[j];
      if (near < 0) break;
      if (static_cast<size_t>(near) >= neighbours.count) continue;
      const auto [slot, is_new] = slots.add(static_cast<uint32_t>(near));
      if (is_new) sums.push_back(0.0f);
      sums[slot] += profile_weights[e] * neighbours.weights[j];
    }
  for (size_t slot = 0; slot < sums.size(); ++slot) {
    const uint32_t item = neighbours.item_of_row(slots.items[slot]);
    const uint64_t key = key_of(sums[slot], item);
    if (best.wants(key) && filter.keeps(item)) best.push(key);
  }
}

// --- fusion

// What one channel found, best first, and what each rank adds to an item's score.
struct ChannelList {
  const int64_t* items;
  const float* scores;
  const float* gains;  // they never rise
  size_t size;
};

struct Fused {
  std::vector<int64_t> items;
  std::vector<float> scores;     // of the channel that counted most
  std::vector<int64_t> channels;  // its number among the lists
  std::vector<float> fused;
};

// The best `number` of all lists by the sum of their gains. An item is of the list in which it gained most, the earlier
// one of equals; items of equal sums stay in the order of their largest gains.
inline Fused fuse(const std::vector<ChannelList>& lists, size_t number) {
  thread_local ItemSlots slots;
  size_t total = 0;
  for (const ChannelList& list : lists) total += list.size;
  slots.reset(total);
  std::vector<double> sums;
  std::vector<std::pair<size_t, size_t>> firsts;  // list and rank
  std::vector<size_t> next(lists.size(), 0);
  for (size_t taken = 0; taken < total; ++taken) {
    size_t from = lists.size();
    for (size_t l = 0; l < lists.size(); ++l)
      if (next[l] < lists[l].size && (from == lists.size() || lists[l].gains[next[l]] > lists[from].gains[next[from]])) from = l;
    const size_t rank = next[from]++;
    const auto [slot, is_new] = slots.add(static_cast<uint32_t>(lists[from].items[rank]));
    if (is_new) sums.push_back(0.0), firsts.emplace_back(from, rank);
    sums[slot] += lists[from].gains[rank];
  }
  Best best(number);
  for (size_t slot = 0; slot < sums.size(); ++slot) best.push(key_of(static_cast<float>(sums[slot]), static_cast<uint32_t>(slot)));
  Fused found;
  for (const uint64_t key : best.sorted()) {
    const auto [list, rank] = firsts[item_of(key)];
    found.items.push_back(lists[list].items[rank]);
    found.scores.push_back(lists[list].scores[rank]);
    found.channels.push_back(static_cast<int64_t>(list));
    found.fused.push_back(score_of(key));
  }
  return found;
}

}  // namespace recall
