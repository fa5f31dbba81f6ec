// The native core: kernels over plain pointers. No torch, no Arrow headers; every loop releases the GIL.
#include <nanobind/nanobind.h>

void register_abort(nanobind::module_& m);
void register_delimited(nanobind::module_& m);
void register_counter(nanobind::module_& m);
void register_lookup(nanobind::module_& m);
void register_hashing(nanobind::module_& m);
void register_exact_sum(nanobind::module_& m);
void register_embedding(nanobind::module_& m);
void register_dense(nanobind::module_& m);
void register_neighbours(nanobind::module_& m);
void register_recall(nanobind::module_& m);
void register_rank(nanobind::module_& m);
void register_tower(nanobind::module_& m);
void register_inflate(nanobind::module_& m);
void register_rings(nanobind::module_& m);
void register_answers(nanobind::module_& m);

NB_MODULE(_native, m) {
  nanobind::set_leak_warnings(false);  // threads of a server may still hold objects when the process ends
  m.doc() = "recmill's native kernels";
  register_abort(m);
  register_delimited(m);
  register_counter(m);
  register_lookup(m);
  register_hashing(m);
  register_exact_sum(m);
  register_embedding(m);
  register_dense(m);
  register_neighbours(m);
  register_recall(m);
  register_rank(m);
  register_tower(m);
  register_inflate(m);
  register_rings(m);
  register_answers(m);
}
