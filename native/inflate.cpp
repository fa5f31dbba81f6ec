// gzip streams for Python; see inflate.hpp.
#include "inflate.hpp"

#include <nanobind/stl/string.h>

#include "arrays.hpp"

namespace {

using Writable = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

gzip::Mark mark_of(uint64_t offset, uint64_t bit, const nb::bytes& window) {
  return {offset, bit, std::string(window.c_str(), window.size())};
}

size_t read_text(gzip::Stream& stream, const Writable& into) {
  uint8_t* data = into.data();
  const size_t room = into.size();
  try {
    nb::gil_scoped_release release;
    return stream.read(data, room);
  } catch (const gzip::Damaged& error) {
    PyErr_SetString(PyExc_OSError, error.what());
    throw nb::python_error();
  }
}

nb::list take_marks(gzip::Stream& stream) {
  nb::list result;
  for (const gzip::Mark& mark : stream.take_marks()) {
    result.append(nb::make_tuple(mark.offset, mark.bit, nb::bytes(mark.window.data(), mark.window.size())));
  }
  return result;
}

}  // namespace

void register_inflate(nb::module_& m) {
  nb::class_<gzip::Stream>(m, "GzipStream")
      .def(nb::init<>())
      .def_static("at", [](uint64_t offset, uint64_t bit, const nb::bytes& window) {
        return gzip::Stream(mark_of(offset, bit, window));
      }, nb::arg("offset"), nb::arg("bit"), nb::arg("window"))
      .def("feed", [](gzip::Stream& stream, const nb::bytes& bytes) {
        stream.feed(reinterpret_cast<const uint8_t*>(bytes.c_str()), bytes.size());
      }, nb::arg("bytes"))
      .def("read", &read_text, nb::arg("into"))
      .def("mark_every", &gzip::Stream::mark_every, nb::arg("spacing"))
      .def("take_marks", &take_marks)
      .def_prop_ro("is_finished", &gzip::Stream::is_finished);
}
