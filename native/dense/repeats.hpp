// Features whose ids repeat in a batch: their part of a product is computed once for each different id, not for each row.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

namespace dense {

// The ids of one feature: row r has number index[r] of the different ones, each of which is first in row first[number].
struct RepeatedFeature {
  size_t feature;  // which of those that were given
  std::vector<uint32_t> index, first;
};

// Those of the features, each with an id for every row or null, whose ids repeat so often that it pays to multiply vectors of
// `width` floats once for each id.
std::vector<RepeatedFeature> find_repeats(size_t rows, const std::vector<const int64_t*>& ids, size_t width);

}  // namespace dense
