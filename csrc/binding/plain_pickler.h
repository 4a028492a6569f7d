// Pickles a training state without running a line of Python for each of its tensors.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "binding/torch_functions.h"

namespace fastpersist {

// Objects of Python and torch that PicklePlain needs.
struct [[gnu::visibility("hidden")]] TorchTypes {  // as what it holds
  pybind11::object tensor;                         // torch.Tensor
  pybind11::object parameter;                      // torch.nn.Parameter
  pybind11::object storage;                        // torch.UntypedStorage
  pybind11::object rebuild_parameter;              // torch._utils._rebuild_parameter
  pybind11::object ordered_dict;                   // collections.OrderedDict
  // torch.dtype to (function that makes a tensor of it again, class that stands for its storage, bytes of which that
  // class counts one element, whether the function gets the dtype, too).
  pybind11::dict rebuild_by_dtype;
  pybind11::object is_ordinary;    // is_ordinary(object): it is neither a tensor nor a storage
  pybind11::object global_opcode;  // global_opcode(class or function): the opcode that names it, or None
  pybind11::object location_of;    // location_of(storage): torch's tag of its device
  bool is_host_tagged_cpu;         // location_of would say "cpu" of each storage of the host
  std::shared_ptr<const TorchFunctions> functions;  // null: Python's attributes of tensors are read instead
};

// Returns (pickle, storages, facts, tensors, for each tensor the index of its storage), byte for byte as skeleton.py's
// pickler makes them. Facts are those of sources.py's StorageFacts, or None if an object's own code has run, since that
// may have changed a storage that was met before. Returns None if the object holds something that only skeleton.py's
// pickler can write; that pickler then reduces again the objects that were reduced here. An error of the object's own
// code is raised unchanged, as there.
//
// It follows CPython's _pickle.c at protocol 2: the same opcodes, the same numbers in the memo, the same batches. Each
// object is reduced as there, by copyreg or its __reduce_ex__, except for plain tensors: the result of their reduction
// is written directly from their attributes. REQUIRES: the GIL is held.
pybind11::object PicklePlain(const pybind11::object& object, const TorchTypes& torch);

}  // namespace fastpersist
