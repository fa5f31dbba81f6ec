// What the recall stage of a server calls; recall.hpp has the work. Every call that takes long releases the GIL.
#include "recall.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <functional>
#include <optional>
#include <tuple>

#include "neighbours.hpp"

namespace {

using recall::Best;
using recall::ItemFilter;
using Matrix = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
constexpr size_t FEW = 2'048;  // items, whose work is done before another thread would have the GIL
using Found = std::pair<Out<int64_t>, Out<float>>;

ItemFilter filter_of(const In<int64_t>& banned, const Mask& allowed) {
  if (!std::is_sorted(banned.data(), banned.data() + banned.size())) throw std::invalid_argument("banned items must be sorted");
  ItemFilter filter;
  filter.banned = banned.data(), filter.num_banned = banned.size();
  if (allowed) filter.allowed = allowed->data(), filter.num_allowed = allowed->size();
  return filter;
}

// Items and scores, best first: what a search has found, before Python gets it.
struct FoundItems {
  std::vector<int64_t> items;
  std::vector<float> scores;

  explicit FoundItems(Best& best) {
    const std::vector<uint64_t>& keys = best.sorted();
    items.resize(keys.size()), scores.resize(keys.size());
    for (size_t i = 0; i < keys.size(); ++i) items[i] = recall::item_of(keys[i]), scores[i] = recall::score_of(keys[i]);
  }
};

// What one channel has to look for. It is run without the GIL, so it keeps the arrays that it reads.
struct Search {
  std::function<void(size_t k, const ItemFilter&, Best&)> run;
};

// Vectors of items as an index was built of them, and what changed since.
struct VectorArrays {
  Matrix built;
  Mask hidden;
  In<int64_t> changed_items;
  Matrix changed;
  In<float> query;

  recall::Vectors vectors() const {
    recall::Vectors vectors;
    vectors.built = built.data(), vectors.count = built.shape(0), vectors.dim = built.shape(1);
    vectors.hidden = mask_data(hidden, vectors.count);
    vectors.changed_items = changed_items.data(), vectors.changed = changed.data(), vectors.num_changed = changed_items.size();
    if (changed.shape(0) != vectors.num_changed || changed.shape(1) != vectors.dim || query.size() != vectors.dim)
      throw std::invalid_argument("vectors differ in size");
    return vectors;
  }
};

Search search_all(Matrix built, Mask hidden, In<int64_t> changed_items, Matrix changed, In<float> query) {
  const VectorArrays arrays{built, hidden, changed_items, changed, query};
  return {[arrays, vectors = arrays.vectors()](size_t, const ItemFilter& filter, Best& best) {
    recall::search_all(vectors, arrays.query.data(), filter, best);
  }};
}

// The inverted lists of an index that the caller keeps open: addresses of its codes (half floats) and its items.
class VectorClusters {
 public:
  VectorClusters(Matrix centers, In<uint64_t> codes, In<uint64_t> items, In<int64_t> sizes) {
    if (codes.size() != centers.shape(0) || items.size() != codes.size() || sizes.size() != codes.size())
      throw std::invalid_argument("each cluster needs a center, codes, items and a size");
    clusters_.dim = centers.shape(1);
    clusters_.centers.assign(centers.data(), centers.data() + centers.size());
    for (size_t c = 0; c < sizes.size(); ++c) {
      clusters_.codes.push_back(reinterpret_cast<const uint16_t*>(codes.data()[c]));
      clusters_.items.push_back(reinterpret_cast<const int64_t*>(items.data()[c]));
      clusters_.sizes.push_back(static_cast<size_t>(sizes.data()[c]));
    }
  }

  Search search(Matrix built, Mask hidden, In<int64_t> changed_items, Matrix changed, In<float> query, size_t probes) const {
    const VectorArrays arrays{built, hidden, changed_items, changed, query};
    const recall::Vectors vectors = arrays.vectors();
    if (vectors.dim != clusters_.dim) throw std::invalid_argument("vectors differ in size");
    return {[this, arrays, vectors, probes](size_t k, const ItemFilter& filter, Best& best) {
      recall::search_clusters(clusters_, vectors, arrays.query.data(), k, probes, filter, best);
    }};
  }

 private:
  recall::Clusters clusters_;
};

// Items that neighbours relate to a profile; those that have none are left out.
Search search_related(const NeighbourLists& neighbours, In<int64_t> profile, In<float> weights) {
  if (profile.size() != weights.size()) throw std::invalid_argument("each item of a profile needs a weight");
  const recall::Neighbours& lists = neighbours.lists;
  std::vector<int32_t> rows;
  std::vector<float> row_weights;
  for (size_t i = 0; i < profile.size(); ++i) {
    int64_t row = profile.data()[i];
    if (lists.items) {
      const int32_t* end = lists.items + lists.count;
      const int32_t* at = std::lower_bound(lists.items, end, row);
      row = at != end && *at == row ? at - lists.items : -1;
    }
    if (static_cast<uint64_t>(row) < lists.count) rows.push_back(static_cast<int32_t>(row)), row_weights.push_back(weights.data()[i]);
  }
  return {[&lists, rows = std::move(rows), row_weights = std::move(row_weights)](size_t, const ItemFilter& filter, Best& best) {
    recall::related(lists, rows.data(), row_weights.data(), rows.size(), filter, best);
  }};
}

// What several searches find, at most k items each: the GIL is given away once for all of them.
std::vector<Found> run_searches(const std::vector<const Search*>& searches, size_t k, In<int64_t> banned, Mask allowed) {
  const ItemFilter filter = filter_of(banned, allowed);
  std::vector<FoundItems> items;
  {
    nb::gil_scoped_release release;
    for (const Search* search : searches) {
      Best best(k);
      search->run(k, filter, best);
      items.emplace_back(best);
    }
  }
  std::vector<Found> found;
  for (FoundItems& one : items) found.emplace_back(to_numpy(std::move(one.items)), to_numpy(std::move(one.scores)));
  return found;
}

// The first k of some items that may be shown.
Out<int64_t> first_shown(In<int64_t> items, In<int64_t> banned, Mask allowed, size_t k) {
  const ItemFilter filter = filter_of(banned, allowed);
  std::vector<int64_t> found;
  {
    const ReleaseGil release(filter.allowed || k > FEW);  // a mask may hide most of them
    for (size_t i = 0; i < items.size() && found.size() < k; ++i)
      if (filter.keeps(static_cast<uint32_t>(items.data()[i]))) found.push_back(items.data()[i]);
  }
  return to_numpy(std::move(found));
}

// Where the k best of some scores are, best first; of equal ones the smaller item, NaN last.
Out<int64_t> best_of(In<float> scores, In<int64_t> items, size_t k) {
  if (items.size() != scores.size()) throw std::invalid_argument("each item needs a score");
  const auto best_places = [&] {
    const ReleaseGil release(scores.size() > FEW);
    std::vector<std::pair<uint64_t, int64_t>> found(scores.size());
    for (size_t i = 0; i < found.size(); ++i)
      found[i] = {recall::key_of(scores.data()[i], static_cast<uint32_t>(items.data()[i])), static_cast<int64_t>(i)};
    const auto is_better = [](const auto& one, const auto& other) { return one.first > other.first; };
    const size_t size = std::min(k, found.size());
    if (size < found.size()) std::nth_element(found.begin(), found.begin() + static_cast<std::ptrdiff_t>(size), found.end(), is_better);
    std::sort(found.begin(), found.begin() + static_cast<std::ptrdiff_t>(size), is_better);
    std::vector<int64_t> places(size);
    for (size_t i = 0; i < size; ++i) places[i] = found[i].second;
    return places;
  };
  return to_numpy(best_places());
}

// One list of several: each is (items, scores, gains, number of its channel). Items, scores, channels, sums of gains.
std::tuple<Out<int64_t>, Out<float>, Out<int8_t>, Out<float>> fuse_lists(
    const std::vector<std::tuple<In<int64_t>, In<float>, In<float>, int8_t>>& given, size_t number) {
  std::vector<recall::ChannelList> lists;
  size_t total = 0;
  for (const auto& [items, scores, gains, channel] : given) {
    if (scores.size() != items.size() || gains.size() != items.size())
      throw std::invalid_argument("each item of a list needs a score and a gain");
    if (!std::is_sorted(gains.data(), gains.data() + gains.size(), std::greater<>()))
      throw std::invalid_argument("gains must not rise");
    lists.push_back({items.data(), scores.data(), gains.data(), items.size()});
    total += items.size();
  }
  recall::Fused fused;
  {
    const ReleaseGil release(total > FEW);
    fused = recall::fuse(lists, number);
  }
  std::vector<int8_t> channels;
  for (const int64_t list : fused.channels) channels.push_back(std::get<3>(given[static_cast<size_t>(list)]));
  return {to_numpy(std::move(fused.items)), to_numpy(std::move(fused.scores)), to_numpy(std::move(channels)),
          to_numpy(std::move(fused.fused))};
}

// Items of several arrays, sorted, each once; without those below 0.
Out<int64_t> unique_items(const std::vector<In<int64_t>>& arrays) {
  std::vector<int64_t> items;
  for (const auto& array : arrays) std::copy_if(array.data(), array.data() + array.size(), std::back_inserter(items), [](int64_t item) { return item >= 0; });
  std::sort(items.begin(), items.end());
  items.erase(std::unique(items.begin(), items.end()), items.end());
  return to_numpy(std::move(items));
}

}  // namespace

void register_recall(nb::module_& m) {
  nb::class_<Search>(m, "Search");
  nb::class_<VectorClusters>(m, "VectorClusters")
      .def(nb::init<Matrix, In<uint64_t>, In<uint64_t>, In<int64_t>>(), nb::arg("centers"), nb::arg("codes"), nb::arg("items"),
           nb::arg("sizes"))
      .def("search", &VectorClusters::search, nb::arg("built"), nb::arg("hidden").none(), nb::arg("changed_items"),
           nb::arg("changed"), nb::arg("query"), nb::arg("probes"), nb::keep_alive<0, 1>());
  m.def("search_all", &search_all, nb::arg("built"), nb::arg("hidden").none(), nb::arg("changed_items"), nb::arg("changed"),
        nb::arg("query"));
  nb::class_<NeighbourLists>(m, "NeighbourLists")
      .def(nb::init<In<int64_t>, In<int32_t>, In<float>, std::optional<In<int32_t>>>(), nb::arg("offsets"), nb::arg("indices"),
           nb::arg("weights"), nb::arg("items").none())
      .def("search", &search_related, nb::arg("profile"), nb::arg("weights"), nb::keep_alive<0, 1>());
  m.def("run_searches", &run_searches, nb::arg("searches"), nb::arg("k"), nb::arg("banned"), nb::arg("allowed").none());
  m.def("first_shown", &first_shown, nb::arg("items"), nb::arg("banned"), nb::arg("allowed").none(), nb::arg("k"));
  m.def("best_of", &best_of, nb::arg("scores"), nb::arg("items"), nb::arg("k"));
  m.def("fuse_lists", &fuse_lists, nb::arg("lists"), nb::arg("number"));
  m.def("unique_items", &unique_items, nb::arg("arrays"));
}
