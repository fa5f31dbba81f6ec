// Random requests to the recall stage from several threads, each compared with plain loops: a program for the sanitizers.
//   cmake -S native -B build/asan -DRECMILL_SANITIZE=address,undefined      (or thread)
//   cmake --build build/asan --target recall_stress && build/asan/recall_stress
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <thread>

#include "recall.hpp"

using namespace recall;

namespace {

constexpr size_t ITEMS = 700, CLUSTERS = 9, N = 5;
constexpr int TURNS = 60, THREADS = 3;

void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "failed: %s\n", what);
  std::exit(1);
}

// Arrays of a bundle, each of exactly the size that it needs.
struct Arrays {
  size_t dim;
  std::vector<float> vectors, weights;
  std::vector<std::vector<uint16_t>> codes{CLUSTERS};
  std::vector<std::vector<int64_t>> items{CLUSTERS};
  std::vector<int32_t> neighbours;
  std::vector<int64_t> offsets{0};
  std::vector<uint8_t> hidden, allowed;
  std::vector<int64_t> banned;

  Arrays(size_t d, std::mt19937& random) : dim(d), hidden(ITEMS), allowed(ITEMS) {
    for (size_t i = 0; i < ITEMS * dim; ++i) vectors.push_back((int(random() % 129) - 64) / 64.0f);  // exact as half floats
    for (size_t i = 0; i < ITEMS; ++i) {
      const size_t c = random() % CLUSTERS;
      items[c].push_back(static_cast<int64_t>(i));
      for (size_t j = 0; j < dim; ++j) codes[c].push_back(half_of(vectors[i * dim + j]));
      hidden[i] = random() % 10 == 0, allowed[i] = random() % 3 != 0;
      if (random() % 20 == 0) banned.push_back(static_cast<int64_t>(i));
      for (size_t j = random() % (N + 1); j > 0; --j) {
        neighbours.push_back(random() % 8 ? static_cast<int32_t>(random() % ITEMS) : -1);
        weights.push_back((random() % 100) / 64.0f);
      }
      offsets.push_back(static_cast<int64_t>(neighbours.size()));
    }
  }
  static uint16_t half_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    const int exponent = static_cast<int>(bits >> 23 & 255) - 127 + 15;
    return static_cast<uint16_t>(bits >> 16 & 0x8000) | (exponent <= 0 ? 0 : static_cast<uint16_t>(exponent << 10 | (bits >> 13 & 1023)));
  }
  ItemFilter filter(bool with_mask) const {
    return {banned.data(), banned.size(), with_mask ? allowed.data() : nullptr, with_mask ? ITEMS : 0};
  }
};

void check_search(const Arrays& arrays, std::mt19937& random) {
  Clusters clusters;
  clusters.dim = arrays.dim;
  for (size_t c = 0; c < CLUSTERS; ++c) {
    for (size_t j = 0; j < arrays.dim; ++j) clusters.centers.push_back((random() % 9) / 8.0f);
    clusters.codes.push_back(arrays.codes[c].data());
    clusters.items.push_back(arrays.items[c].data());
    clusters.sizes.push_back(arrays.items[c].size());
  }
  std::vector<float> query, changed;
  for (size_t j = 0; j < arrays.dim; ++j) query.push_back((int(random() % 33) - 16) / 16.0f), changed.push_back(0.25f);
  const int64_t changed_item = ITEMS - 1;
  Vectors vectors;
  vectors.built = arrays.vectors.data(), vectors.count = ITEMS, vectors.dim = arrays.dim, vectors.hidden = arrays.hidden.data();
  vectors.changed_items = &changed_item, vectors.changed = changed.data(), vectors.num_changed = 1;
  const ItemFilter filter = arrays.filter(random() % 2);
  std::vector<uint64_t> expected;
  for (size_t i = 0; i < ITEMS; ++i) {
    float score = 0;
    for (size_t j = 0; j < arrays.dim; ++j) score += query[j] * arrays.vectors[i * arrays.dim + j];
    if (vectors.shows(static_cast<uint32_t>(i), filter)) expected.push_back(key_of(score, static_cast<uint32_t>(i)));
  }
  const size_t k = random() % 2 ? expected.size() : random() % 40;
  Best exact(k), clustered(k);
  vectors.num_changed = 0;
  search_all(vectors, query.data(), filter, exact);
  search_clusters(clusters, vectors, query.data(), k, CLUSTERS, filter, clustered);
  std::sort(expected.begin(), expected.end(), std::greater<>());
  expected.resize(std::min(k, expected.size()));
  require(exact.sorted() == expected, "a scan of all vectors");
  require(clustered.sorted() == expected, "a scan of all clusters");
  vectors.num_changed = 1;
  Best some(k + 1);
  search_clusters(clusters, vectors, query.data(), k, 1, filter, some);
  require(some.sorted().size() >= std::min(k, expected.size()), "more clusters when the nearest have too few");
}

void check_related_and_fused(const Arrays& arrays, std::mt19937& random) {
  const Neighbours neighbours{arrays.offsets.data(), arrays.neighbours.data(), arrays.weights.data(), ITEMS};
  std::vector<int32_t> profile;
  std::vector<float> weights;
  for (size_t i = random() % 50; i > 0; --i) profile.push_back(static_cast<int32_t>(random() % ITEMS)), weights.push_back(0.5f);
  std::map<uint32_t, float> sums;
  for (size_t e = 0; e < profile.size(); ++e)
    for (int64_t j = arrays.offsets[profile[e]]; j < arrays.offsets[profile[e] + 1] && arrays.neighbours[j] >= 0; ++j)
      sums[static_cast<uint32_t>(arrays.neighbours[j])] += 0.5f * arrays.weights[j];
  const ItemFilter filter = arrays.filter(random() % 2);
  std::vector<uint64_t> expected;
  for (const auto& [item, sum] : sums) if (filter.keeps(item)) expected.push_back(key_of(sum, item));
  std::sort(expected.begin(), expected.end(), std::greater<>());
  Best best(30);
  related(neighbours, profile.data(), weights.data(), profile.size(), filter, best);
  expected.resize(std::min<size_t>(30, expected.size()));
  require(best.sorted() == expected, "related items");

  std::vector<int64_t> items;
  std::vector<float> scores, gains;
  for (const uint64_t key : best.sorted()) {
    items.push_back(item_of(key)), scores.push_back(score_of(key));
    gains.push_back(1.0f / static_cast<float>(gains.size() + 1));
  }
  const ChannelList list{items.data(), scores.data(), gains.data(), items.size()};
  const Fused fused = fuse({list, list}, 20);
  require(fused.items.size() == std::min<size_t>(20, items.size()), "as many items as there are");
  for (size_t i = 0; i < fused.items.size(); ++i)
    require(fused.items[i] == items[i] && fused.fused[i] == 2 * gains[i] && !fused.channels[i], "a list fused with itself");
}

void work(unsigned seed) {
  std::mt19937 random(seed);
  for (int turn = 0; turn < TURNS; ++turn) {
    const Arrays arrays(1 + random() % 70, random);
    check_search(arrays, random);
    check_related_and_fused(arrays, random);
  }
}

}  // namespace

int main() {
  std::vector<std::thread> threads;
  for (int t = 0; t < THREADS; ++t) threads.emplace_back(work, static_cast<unsigned>(t));
  for (auto& thread : threads) thread.join();
  std::puts("fine");
}
