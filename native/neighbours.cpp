// Item-item models: which items follow or accompany each other in users' sequences, and the lists they give.
// A sequence is one user's items, oldest first: items[offsets[u] .. offsets[u + 1]).
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>

#include "neighbours.hpp"

namespace {

struct Sequences {
  const int64_t* offsets;
  const int32_t* items;
  int64_t users;
  Sequences(const In<int64_t>& o, const In<int32_t>& i, int64_t num_items)
      : offsets(o.data()), items(i.data()), users(static_cast<int64_t>(o.size()) - 1) {
    if (o.size() == 0 || offsets[0] != 0 || offsets[users] != static_cast<int64_t>(i.size()))
      throw std::invalid_argument("offsets must run from 0 to the number of items");
    for (int64_t u = 0; u < users; ++u)
      if (offsets[u] > offsets[u + 1]) throw std::invalid_argument("offsets must not fall");
    for (size_t e = 0; e < i.size(); ++e)
      if (items[e] < 0 || items[e] >= num_items) throw std::invalid_argument("an item is out of range");
  }
};

// Events by item, oldest first, and the user of each event.
struct Events {
  std::vector<int64_t> starts, events;
  std::vector<int32_t> users;
  Events(const Sequences& s, int64_t num_items)
      : starts(num_items + 1, 0), events(s.offsets[s.users]), users(s.offsets[s.users]) {
    const int64_t total = s.offsets[s.users];
    for (int64_t e = 0; e < total; ++e) ++starts[s.items[e] + 1];
    for (int64_t item = 0; item < num_items; ++item) starts[item + 1] += starts[item];
    std::vector<int64_t> next(starts.begin(), starts.end() - 1);
    for (int64_t u = 0; u < s.users; ++u)
      for (int64_t e = s.offsets[u]; e < s.offsets[u + 1]; ++e) {
        users[e] = static_cast<int32_t>(u);
        events[next[s.items[e]]++] = e;
      }
  }
};

// Values of some items out of many; clearing costs as much as was added.
class Accumulator {
 public:
  void resize(size_t size) {
    if (values_.size() < size) { values_.resize(size, 0.0f); is_touched_.resize(size, 0); }
  }
  void add(int32_t item, float value) {
    if (!is_touched_[item]) { is_touched_[item] = 1; touched.push_back(item); }
    values_[item] += value;
  }
  float operator[](int32_t item) const { return values_[item]; }
  void clear() {
    for (int32_t item : touched) { values_[item] = 0.0f; is_touched_[item] = 0; }
    touched.clear();
  }
  std::vector<int32_t> touched;

 private:
  std::vector<float> values_;
  std::vector<uint8_t> is_touched_;
};

// What goes with an item: with max_gap 0 every other item of the same sequences counts 1; else those that follow within
// max_gap events count 1 / gap.
void add_related(const Sequences& s, const Events& by_item, int32_t item, int64_t max_gap, Accumulator& sums) {
  for (int64_t k = by_item.starts[item]; k < by_item.starts[item + 1]; ++k) {
    const int64_t e = by_item.events[k], user = by_item.users[e], end = s.offsets[user + 1];
    if (max_gap == 0) {
      for (int64_t other = s.offsets[user]; other < end; ++other)
        if (other != e) sums.add(s.items[other], 1.0f);
    } else {
      for (int64_t gap = 1; gap <= max_gap && e + gap < end; ++gap)
        sums.add(s.items[e + gap], 1.0f / static_cast<float>(gap));
    }
  }
}

// The best n of some items, ties to the smaller index; the rest is dropped.
void keep_best(std::vector<std::pair<float, int32_t>>& found, size_t n) {
  const auto is_better = [](const auto& a, const auto& b) {
    return a.first != b.first ? a.first > b.first : a.second < b.second;
  };
  const size_t kept = std::min(n, found.size());
  std::partial_sort(found.begin(), found.begin() + kept, found.end(), is_better);
  found.resize(kept);
}

using Lists = std::pair<Out<int32_t>, Out<float>>;
using RaggedLists = std::tuple<Out<int64_t>, Out<int32_t>, Out<float>>;

// Offsets, indices and weights of the lists of all items, one behind the other.
RaggedLists joined(const std::vector<std::vector<std::pair<float, int32_t>>>& lists) {
  std::vector<int64_t> offsets(1, 0);
  for (const auto& list : lists) offsets.push_back(offsets.back() + static_cast<int64_t>(list.size()));
  std::vector<int32_t> indices;
  std::vector<float> weights;
  indices.reserve(offsets.back()), weights.reserve(offsets.back());
  for (const auto& list : lists)
    for (const auto& [weight, index] : list) weights.push_back(weight), indices.push_back(index);
  return {to_numpy(std::move(offsets)), to_numpy(std::move(indices)), to_numpy(std::move(weights))};
}

// At most n neighbours of each item, best first. The weight of j for i is
// c_ij / ((c_i + shrink)^own_power (c_j + shrink)^other_power); c_i and c_j sum c_ij over either side.
RaggedLists related_items(In<int64_t> offsets, In<int32_t> items, int64_t num_items, int64_t max_gap, double own_power,
                          double other_power, double shrink, int64_t n, int threads) {
  if (num_items < 0 || n < 1 || max_gap < 0) throw std::invalid_argument("sizes must not be negative");
  const Sequences s(offsets, items, num_items);
  std::vector<std::vector<std::pair<float, int32_t>>> lists(num_items);
  {
    nb::gil_scoped_release release;
    const Events by_item(s, num_items);
    std::vector<float> own(num_items, 0.0f), other(num_items, 0.0f);
    const bool is_directed = max_gap > 0;
    for (int64_t u = 0; u < s.users; ++u)
      for (int64_t e = s.offsets[u]; e < s.offsets[u + 1]; ++e) {
        if (!is_directed) { own[s.items[e]] += 1.0f; continue; }
        for (int64_t gap = 1; gap <= max_gap && e + gap < s.offsets[u + 1]; ++gap) {
          own[s.items[e]] += 1.0f / static_cast<float>(gap);
          other[s.items[e + gap]] += 1.0f / static_cast<float>(gap);
        }
      }
    const auto scaled = [shrink](std::vector<float>& sums, double power) {
      for (float& value : sums) value = static_cast<float>(std::pow(value + shrink, -power));
    };
    if (!is_directed) other = own;
    scaled(own, own_power);
    scaled(other, other_power);
#pragma omp parallel num_threads(threads)
    {
      Accumulator sums;
      sums.resize(num_items);
      std::vector<std::pair<float, int32_t>> found;
#pragma omp for schedule(dynamic, 64)
      for (int64_t item = 0; item < num_items; ++item) {
        add_related(s, by_item, static_cast<int32_t>(item), max_gap, sums);
        found.clear();
        for (int32_t j : sums.touched)
          if (j != item) found.emplace_back(sums[j] * own[item] * other[j], j);
        sums.clear();
        keep_best(found, n);
        lists[item].assign(found.begin(), found.end());
      }
    }
  }
  return joined(lists);
}

// For each pair of items the weights of the sequences that hold both, added up; on the diagonal of those with the item.
Out<float> co_counts(In<int64_t> offsets, In<int32_t> items, In<float> weights, int64_t num_items, int threads) {
  const Sequences s(offsets, items, num_items);
  if (static_cast<int64_t>(weights.size()) != s.users) throw std::invalid_argument("each sequence needs a weight");
  std::vector<float> counts(num_items * num_items, 0.0f);
  {
    nb::gil_scoped_release release;
    const Events by_item(s, num_items);
#pragma omp parallel for schedule(dynamic, 64) num_threads(threads)
    for (int64_t item = 0; item < num_items; ++item) {
      float* row = counts.data() + item * num_items;
      for (int64_t k = by_item.starts[item]; k < by_item.starts[item + 1]; ++k) {
        const int64_t user = by_item.users[by_item.events[k]];
        const float weight = weights.data()[user];
        for (int64_t e = s.offsets[user]; e < s.offsets[user + 1]; ++e) row[s.items[e]] += weight;
      }
    }
  }
  return to_numpy(std::move(counts));
}

// The k items that add up to most over each user's profile: item p of it with weight w adds w times p's neighbours.
// Items of `banned` and those that `allowed` has 0 for are left out. Items and scores [users * k], -1 and 0 behind.
Lists recommend_related(In<int64_t> offsets, In<int32_t> items, In<float> profile_weights, const NeighbourLists& neighbours,
                        In<int64_t> banned_offsets, In<int32_t> banned, std::optional<In<uint8_t>> allowed, int64_t k) {
  if (k < 1) throw std::invalid_argument("k must be at least 1");
  const recall::Neighbours& lists = neighbours.lists;
  const int64_t num_items = static_cast<int64_t>(lists.count);
  const Sequences profiles(offsets, items, num_items);
  if (profile_weights.size() != items.size() || banned_offsets.size() != offsets.size())
    throw std::invalid_argument("profiles, their weights and banned items differ in length");
  if (banned_offsets.data()[profiles.users] > static_cast<int64_t>(banned.size()))
    throw std::invalid_argument("banned offsets exceed the banned items");
  if (allowed && static_cast<int64_t>(allowed->size()) < num_items)
    throw std::invalid_argument("allowed needs a value for each item");
  std::vector<int32_t> chosen(profiles.users * k, -1);
  std::vector<float> scores(profiles.users * k, 0.0f);
  {
    nb::gil_scoped_release release;
    thread_local Accumulator sums;
    thread_local std::vector<uint8_t> is_banned;
    sums.resize(num_items);
    if (static_cast<int64_t>(is_banned.size()) < num_items) is_banned.resize(num_items, 0);
    std::vector<std::pair<float, int32_t>> found;
    for (int64_t u = 0; u < profiles.users; ++u) {
      for (int64_t e = profiles.offsets[u]; e < profiles.offsets[u + 1]; ++e) {
        const int32_t row = profiles.items[e];
        for (int64_t j = lists.offsets[row]; j < lists.offsets[row + 1] && lists.indices[j] >= 0; ++j)
          if (lists.indices[j] < num_items) sums.add(lists.indices[j], profile_weights.data()[e] * lists.weights[j]);
      }
      const int64_t first = banned_offsets.data()[u], last = banned_offsets.data()[u + 1];
      const auto mark = [&](uint8_t value) {
        for (int64_t b = first; b < last; ++b)
          if (banned.data()[b] >= 0 && banned.data()[b] < num_items) is_banned[banned.data()[b]] = value;
      };
      mark(1);
      found.clear();
      for (int32_t item : sums.touched)
        if (!is_banned[item] && (!allowed || allowed->data()[item])) found.emplace_back(sums[item], item);
      mark(0);
      sums.clear();
      keep_best(found, k);
      for (size_t r = 0; r < found.size(); ++r) {
        scores[u * k + r] = found[r].first;
        chosen[u * k + r] = found[r].second;
      }
    }
  }
  return {to_numpy(std::move(chosen)), to_numpy(std::move(scores))};
}

}  // namespace

void register_neighbours(nb::module_& m) {
  m.def("related_items", &related_items);
  m.def("co_counts", &co_counts);
  m.def("recommend_related", &recommend_related, nb::arg("offsets"), nb::arg("items"), nb::arg("profile_weights"),
        nb::arg("neighbours"), nb::arg("banned_offsets"), nb::arg("banned"), nb::arg("allowed").none(), nb::arg("k"));
}
