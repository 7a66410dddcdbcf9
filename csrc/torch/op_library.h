// op_library.h - Registers ops in the namespace SPARSE_CE_NAMESPACE. One process can load two builds of this package if
// their namespaces differ: build.toml passes a name that is unique to a build.
#pragma once

#include "../torch_calls.h"

#include <torch/csrc/stable/library.h>

#include <cstdint>

#ifndef SPARSE_CE_NAMESPACE
#define SPARSE_CE_NAMESPACE sparse_ce
#endif

// libtorch has these functions since 2.12. The weak references let the library load without them.
extern "C" __attribute__((weak)) int32_t torch_tag_pt2_compliant_tag();
extern "C" __attribute__((weak)) AOTITorchError torch_library_def_with_tags(TorchLibraryHandle, const char*,
                                                                            const int32_t*, int32_t);

namespace sparse_ce {

// Defines all ops of the namespace. From torch 2.12 on they have the tag pt2_compliant_tag.
class OpLibrary {
 public:
  explicit OpLibrary(void (*define)(OpLibrary&)) {
    STABLE_TORCH_ERROR_CODE_CHECK(
        aoti_torch_library_init_def(C10_STRINGIZE(SPARSE_CE_NAMESPACE), __FILE__, __LINE__, &library_));
    define(*this);
  }
  ~OpLibrary() { aoti_torch_delete_library_object(library_); }
  OpLibrary(const OpLibrary&) = delete;
  OpLibrary& operator=(const OpLibrary&) = delete;

  void def(const char* schema) {
    if (!torch_library_def_with_tags) {
      STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_library_def(library_, schema));
      return;
    }
    const int32_t tag = torch_tag_pt2_compliant_tag();
    STABLE_TORCH_ERROR_CODE_CHECK(torch_library_def_with_tags(library_, schema, &tag, 1));
  }

 private:
  TorchLibraryHandle library_ = nullptr;
};

}  // namespace sparse_ce

#define SCE_LIBRARY(m)                                         \
  static void define_ops(::sparse_ce::OpLibrary&);             \
  static const ::sparse_ce::OpLibrary op_library(&define_ops); \
  static void define_ops(::sparse_ce::OpLibrary& m)

// STABLE_TORCH_LIBRARY_IMPL turns its argument into a string. The macro in between expands the argument first.
#define SCE_EXPANDED_LIBRARY_IMPL(name, key, m) STABLE_TORCH_LIBRARY_IMPL(name, key, m)
#define SCE_LIBRARY_IMPL(key, m) SCE_EXPANDED_LIBRARY_IMPL(SPARSE_CE_NAMESPACE, key, m)
