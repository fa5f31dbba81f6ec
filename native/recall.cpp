// What the recall stage of a server calls; recall.hpp has the work. Every call that takes long releases the GIL.
#include "recall.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>

#include <optional>
#include <tuple>

#include "arrays.hpp"

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

template <class Search>
Found found(size_t k, const Search& search) {
  const auto best_items = [&] {
    nb::gil_scoped_release release;
    Best best(k);
    search(best);
    return FoundItems(best);
  };
  FoundItems items = best_items();
  return {to_numpy(std::move(items.items)), to_numpy(std::move(items.scores))};
}

recall::Vectors vectors_of(const Matrix& built, const Mask& hidden, const In<int64_t>& changed_items, const Matrix& changed,
                           const In<float>& query) {
  recall::Vectors vectors;
  vectors.built = built.data(), vectors.count = built.shape(0), vectors.dim = built.shape(1);
  vectors.hidden = mask_data(hidden, vectors.count);
  vectors.changed_items = changed_items.data(), vectors.changed = changed.data(), vectors.num_changed = changed_items.size();
  if (changed.shape(0) != vectors.num_changed || changed.shape(1) != vectors.dim || query.size() != vectors.dim)
    throw std::invalid_argument("vectors differ in size");
  return vectors;
}

Found search_all(Matrix built, Mask hidden, In<int64_t> changed_items, Matrix changed, In<float> query, size_t k,
                 In<int64_t> banned, Mask allowed) {
  const recall::Vectors vectors = vectors_of(built, hidden, changed_items, changed, query);
  const ItemFilter filter = filter_of(banned, allowed);
  return found(k, [&](Best& best) { recall::search_all(vectors, query.data(), filter, best); });
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

  Found search(Matrix built, Mask hidden, In<int64_t> changed_items, Matrix changed, In<float> query, size_t k, size_t probes,
               In<int64_t> banned, Mask allowed) const {
    const recall::Vectors vectors = vectors_of(built, hidden, changed_items, changed, query);
    if (vectors.dim != clusters_.dim) throw std::invalid_argument("vectors differ in size");
    const ItemFilter filter = filter_of(banned, allowed);
    return found(k, [&](Best& best) { recall::search_clusters(clusters_, vectors, query.data(), k, probes, filter, best); });
  }

 private:
  recall::Clusters clusters_;
};

// The k items that item-item neighbours relate most to a profile.
Found related_to(In<int32_t> profile, In<float> weights, In<int32_t> indices, In<float> neighbour_weights, size_t n,
                 In<int64_t> banned, Mask allowed, size_t k) {
  if (n < 1 || indices.size() % n || indices.size() != neighbour_weights.size() || profile.size() != weights.size())
    throw std::invalid_argument("neighbours must be [items, n], and each item of a profile needs a weight");
  const recall::Neighbours neighbours{indices.data(), neighbour_weights.data(), indices.size() / n, n};
  for (size_t i = 0; i < profile.size(); ++i)
    if (static_cast<size_t>(static_cast<uint32_t>(profile.data()[i])) >= neighbours.count)
      throw std::invalid_argument("an item is out of range");
  const ItemFilter filter = filter_of(banned, allowed);
  return found(k, [&](Best& best) { recall::related(neighbours, profile.data(), weights.data(), profile.size(), filter, best); });
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

// One list of several: each is (items, scores, gains). Items, scores, numbers of their lists, sums of gains.
std::tuple<Out<int64_t>, Out<float>, Out<int64_t>, Out<float>> fuse_lists(const nb::list& given, size_t number) {
  std::vector<std::tuple<In<int64_t>, In<float>, In<float>>> arrays;
  std::vector<recall::ChannelList> lists;
  size_t total = 0;
  for (nb::handle one : given) {
    const auto& [items, scores, gains] = arrays.emplace_back(nb::cast<std::tuple<In<int64_t>, In<float>, In<float>>>(one));
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
  return {to_numpy(std::move(fused.items)), to_numpy(std::move(fused.scores)), to_numpy(std::move(fused.channels)),
          to_numpy(std::move(fused.fused))};
}

}  // namespace

void register_recall(nb::module_& m) {
  nb::class_<VectorClusters>(m, "VectorClusters")
      .def(nb::init<Matrix, In<uint64_t>, In<uint64_t>, In<int64_t>>(), nb::arg("centers"), nb::arg("codes"), nb::arg("items"),
           nb::arg("sizes"))
      .def("search", &VectorClusters::search, nb::arg("built"), nb::arg("hidden").none(), nb::arg("changed_items"),
           nb::arg("changed"), nb::arg("query"), nb::arg("k"), nb::arg("probes"), nb::arg("banned"), nb::arg("allowed").none());
  m.def("search_all", &search_all, nb::arg("built"), nb::arg("hidden").none(), nb::arg("changed_items"), nb::arg("changed"),
        nb::arg("query"), nb::arg("k"), nb::arg("banned"), nb::arg("allowed").none());
  m.def("related_to", &related_to, nb::arg("profile"), nb::arg("weights"), nb::arg("indices"), nb::arg("neighbour_weights"),
        nb::arg("n"), nb::arg("banned"), nb::arg("allowed").none(), nb::arg("k"));
  m.def("first_shown", &first_shown, nb::arg("items"), nb::arg("banned"), nb::arg("allowed").none(), nb::arg("k"));
  m.def("best_of", &best_of, nb::arg("scores"), nb::arg("items"), nb::arg("k"));
  m.def("fuse_lists", &fuse_lists, nb::arg("lists"), nb::arg("number"));
}
