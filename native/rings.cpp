// Rings of shared memory for Python: see rings.hpp.
#include "rings.hpp"

#include <nanobind/stl/vector.h>

#include "arrays.hpp"

namespace {

using Bytes = InOut<uint8_t>;

struct PyRings {
  Bytes memory;
  rings::Rings rings;

  PyRings(Bytes given, size_t rank, size_t size, size_t ring_bytes)
      : memory(given), rings(given.data(), rank, size, ring_bytes) {
    if (rank >= size || ring_bytes == 0 || ring_bytes % rings::LINE) throw std::invalid_argument("rank or ring size out of range");
    if (given.size() != rings::Rings::memory_size(size, ring_bytes)) throw std::invalid_argument("the memory has another size");
  }

  uint64_t start(const std::vector<In<uint8_t>>& sent, const std::vector<Bytes>& received) {
    std::vector<rings::Part> from, into;
    for (const auto& one : sent) from.push_back({const_cast<uint8_t*>(one.data()), one.size(), 0});
    for (const auto& one : received) into.push_back({one.data(), one.size(), 0});
    nb::gil_scoped_release release;
    return rings.start(from, into);
  }
};

}  // namespace

void register_rings(nb::module_& m) {
  nb::class_<PyRings>(m, "Rings")
      .def(nb::init<Bytes, size_t, size_t, size_t>())
      .def_static("memory_size", &rings::Rings::memory_size)
      .def("start", &PyRings::start)
      .def("wait", [](PyRings& r, uint64_t transfer, double seconds) {
        nb::gil_scoped_release release;
        return r.rings.wait(transfer, seconds);
      })
      .def("close", [](PyRings& r) { r.rings.close(); });
}
