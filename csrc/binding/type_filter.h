// A callable that calls Python only for objects whose type is not known to be uninteresting.
#pragma once

#include <pybind11/pybind11.h>

namespace fastpersist {

// Returns f(object): None if the object's exact type is a key of `uninteresting`, else otherwise(object). A pickler
// asks for a persistent id of every object in the tree, a dozen for each tensor, and almost all of them are numbers,
// text and tuples: this answers for those without running a line of Python.
pybind11::object MakeTypeFilter(const pybind11::dict& uninteresting, const pybind11::object& otherwise);

}  // namespace fastpersist
