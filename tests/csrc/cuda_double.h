// The double of the CUDA driver for C++ test programs: loads the library, and
// holds its functions (tests/support/cuda_double/interface.h says what they do). Once it is loaded, the product's own
// dlopen("libcuda.so.1") finds it.
//
//     const CudaDouble& cuda = CudaDouble::Get();  // ends the program with 77, "cannot run here", where it is not
//     built cuda.reset(1);
#pragma once

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>

#include "../support/cuda_double/interface.h"

namespace fastpersist {

struct CudaDouble {
#define FASTPERSIST_MEMBER(name) decltype(&double_##name) name = nullptr;
  FASTPERSIST_CUDA_DOUBLE_FUNCTIONS(FASTPERSIST_MEMBER)
#undef FASTPERSIST_MEMBER

  void* library = nullptr;  // for dlsym of the driver's own calls

  // The path of the library: $CUDA_DOUBLE; or beside this program, where tests/csrc/Makefile puts it; or where Python
  // puts it; else "".
  static std::string FindLibrary() {
    if (const char* const given = std::getenv("CUDA_DOUBLE"); given != nullptr && *given != '\0') return given;
    char program[4096];
    const ssize_t size = readlink("/proc/self/exe", program, sizeof(program));
    const std::string_view path(program, static_cast<size_t>(size > 0 ? size : 0));
    const std::string folder(path.substr(0, std::min(path.rfind('/'), path.size())));
    for (const std::string& place : {folder + "/libcuda.so.1", folder + "/../cuda-double/libcuda.so.1",
                                     std::string("build/cuda-double/libcuda.so.1")}) {
      if (access(place.c_str(), R_OK) == 0) return place;
    }
    return "";
  }

  // Null, with the reason, if it cannot be loaded. Stays loaded.
  static const CudaDouble* Load(std::string* why_not) {
    const std::string path = FindLibrary();
    if (path.empty()) {
      *why_not = "the double of the CUDA driver is not built: set CUDA_DOUBLE, or run tests/devices first";
      return nullptr;
    }
    static CudaDouble cuda;
    cuda.library = dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL);
    if (cuda.library == nullptr) {
      *why_not = dlerror();
      return nullptr;
    }
#define FASTPERSIST_LOOK_UP(name)                                                               \
  cuda.name = reinterpret_cast<decltype(&double_##name)>(dlsym(cuda.library, "double_" #name)); \
  if (cuda.name == nullptr) {                                                                   \
    *why_not = path + " has no double_" #name ": it is no double, or an old one";               \
    return nullptr;                                                                             \
  }
    FASTPERSIST_CUDA_DOUBLE_FUNCTIONS(FASTPERSIST_LOOK_UP)
#undef FASTPERSIST_LOOK_UP
    return &cuda;
  }

  static const CudaDouble& Get() {
    static const CudaDouble* const cuda = [] {
      std::string why_not;
      const CudaDouble* const loaded = Load(&why_not);
      if (loaded == nullptr) {
        std::printf("%s\n", why_not.c_str());
        std::exit(77);
      }
      return loaded;
    }();
    return *cuda;
  }

  // All violations in one text, one on each line; "" without any.
  std::string Violations() const {
    std::string text;
    for (int i = 0; i < violation_count(); ++i) text += std::string(violation(i)) + "\n";
    return text;
  }
};

}  // namespace fastpersist
