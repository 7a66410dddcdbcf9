// torch_calls.h - Converts the error codes of libtorch's C functions to exceptions that carry libtorch's message.
//
// Include this header before any of torch's own: it redefines the macro with which they check these codes.
#pragma once

#include <torch/headeronly/util/shim_utils.h>

#include <new>
#include <stdexcept>
#include <string>

// libtorch has this function since 2.13. The weak reference lets the library load without it.
extern "C" __attribute__((weak)) const char* torch_exception_get_what_without_backtrace();

namespace sparse_ce {

// Repeats PyTorch's message for a failed allocation. Training libraries recognize it and retry with a smaller batch.
constexpr const char* kHostOutOfMemory = "DefaultCPUAllocator: can't allocate memory: ";
#ifdef USE_CUDA
constexpr const char* kOutOfMemory = "CUDA out of memory. ";
#else
constexpr const char* kOutOfMemory = kHostOutOfMemory;
#endif

[[noreturn]] inline void rethrow_torch_error(const std::string& call) {
  if (torch_exception_get_what_without_backtrace) {
    const std::string what = torch_exception_get_what_without_backtrace();
    if (what == std::bad_alloc().what()) throw std::bad_alloc();  // thrown by a kernel in torch_parallel_for
    throw std::runtime_error(what);
  }
  // Arguments are checked before the call, so only the allocation itself can fail in these functions.
  constexpr const char* kAllocate[] = {"empty",    "zeros",     "contiguous", "clone",
                                       "aten::to", "aten::sum", "aten::sort", "unique"};
  for (const char* allocates : kAllocate)
    if (call.find(allocates) != std::string::npos) throw std::runtime_error(std::string(kOutOfMemory) + call);
  throw std::runtime_error("sparse_ce: " + call + " failed; torch 2.13 or newer reports the reason");
}

}  // namespace sparse_ce

#undef TORCH_ERROR_CODE_CHECK
#define TORCH_ERROR_CODE_CHECK(call) \
  if ((call) != TORCH_SUCCESS) ::sparse_ce::rethrow_torch_error(#call);

// Since torch 2.13 its headers use another macro. That of 2.14 appends a path of the build to the message.
#include <torch/csrc/stable/macros.h>
#undef STABLE_TORCH_ERROR_CODE_CHECK
#define STABLE_TORCH_ERROR_CODE_CHECK(call) TORCH_ERROR_CODE_CHECK(call)
#include <torch/csrc/stable/ops.h>
