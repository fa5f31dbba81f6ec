// Items of an answer as protobuf, field by field as recmill.proto numbers them: with Python's messages, fifty of them cost as much as
// a search of the index.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>

#include <cstdint>
#include <cstring>
#include <optional>
#include <string>

namespace nb = nanobind;

namespace {

constexpr char VARINT = 0, BYTES = 2, FLOAT = 5;

void add_varint(std::string& to, uint64_t value) {
  for (; value > 127; value >>= 7) to.push_back(static_cast<char>(value | 128));
  to.push_back(static_cast<char>(value));
}
void add_tag(std::string& to, int field, char type) { to.push_back(static_cast<char>(field << 3 | type)); }
void add_bytes(std::string& to, int field, const char* bytes, size_t size) {
  add_tag(to, field, BYTES);
  add_varint(to, size);
  to.append(bytes, size);
}
void add_text(std::string& to, int field, nb::handle text) {
  Py_ssize_t size = 0;
  const char* bytes = PyUnicode_AsUTF8AndSize(text.ptr(), &size);
  if (!bytes) throw nb::python_error();
  add_bytes(to, field, bytes, static_cast<size_t>(size));
}
void add_float(std::string& to, int field, float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if (!bits) return;  // the default; -0 is not
  add_tag(to, field, FLOAT);
  for (int shift = 0; shift < 32; shift += 8) to.push_back(static_cast<char>(bits >> shift));
}

// Names of attributes, made once: making them would take longer than the look-ups.
struct Name {
  explicit Name(const char* name) : text(PyUnicode_InternFromString(name)) {}
  nb::object of(nb::handle item) const {
    PyObject* found = PyObject_GetAttr(item.ptr(), text);
    if (!found) throw nb::python_error();
    return nb::steal(found);
  }
  PyObject* text;
};

// Items with an id, a score, a channel, a score of recall and a boost (1 is not written), as the field `items` of an Answer; None if any has more.
std::optional<nb::bytes> encode_items(const nb::list& items) {
  static const Name ID("id"), SCORE("score"), CHANNEL("channel"), RECALL_SCORE("recall_score"),
      BOOST("boost"), MORE[] = {Name("fields"), Name("why"), Name("because")};
  std::string all, one, id_bytes;
  for (nb::handle item : items) {
    for (const Name& more : MORE)
      if (nb::len(more.of(item))) return std::nullopt;
    one.clear(), id_bytes.clear();
    const nb::object id = ID.of(item);
    if (nb::isinstance<nb::str>(id)) add_text(id_bytes, 1, id);
    else add_tag(id_bytes, 2, VARINT), add_varint(id_bytes, static_cast<uint64_t>(nb::cast<int64_t>(id)));
    add_bytes(one, 1, id_bytes.data(), id_bytes.size());
    add_float(one, 2, static_cast<float>(nb::cast<double>(SCORE.of(item))));
    add_text(one, 3, CHANNEL.of(item));
    add_float(one, 4, static_cast<float>(nb::cast<double>(RECALL_SCORE.of(item))));
    if (const double boost = nb::cast<double>(BOOST.of(item)); boost != 1) add_float(one, 8, static_cast<float>(boost));
    add_bytes(all, 1, one.data(), one.size());
  }
  return nb::bytes(all.data(), all.size());
}

}  // namespace

void register_answers(nb::module_& m) { m.def("encode_items", &encode_items, nb::arg("items")); }
