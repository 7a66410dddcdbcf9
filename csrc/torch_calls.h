// torch_calls.h - libtorch's C functions return an error code. A failed call raises what libtorch said.
//
// It redefines the macro with which torch's own headers check these codes, so it comes before any of them.
#pragma once

#include <torch/headeronly/util/shim_utils.h>

#include <new>
#include <stdexcept>
#include <string>

// libtorch has this function from 2.13 on. The reference is weak, so that the library loads without it.
extern "C" __attribute__((weak)) const char* torch_exception_get_what_without_backtrace();

namespace sparse_ce {

// PyTorch's words for an allocation that failed: training libraries recognise them, and try again with a smaller batch.
constexpr const char* kHostOutOfMemory = "DefaultCPUAllocator: can't allocate memory: ";
#ifdef USE_CUDA
constexpr const char* kOutOfMemory = "CUDA out of memory. ";
#else
constexpr const char* kOutOfMemory = kHostOutOfMemory;
#endif

[[noreturn]] inline void raise_what_torch_said(const std::string& call) {
  if (torch_exception_get_what_without_backtrace) {
    const std::string what = torch_exception_get_what_without_backtrace();
    if (what == std::bad_alloc().what()) throw std::bad_alloc();  // of a kernel, through torch_parallel_for
    throw std::runtime_error(what);
  }
  // Arguments are checked before: what can still fail of a call that allocates is the allocation.
  constexpr const char* kAllocate[] = {"empty",    "zeros",     "contiguous", "clone",
                                       "aten::to", "aten::sum", "aten::sort", "unique"};
  for (const char* allocates : kAllocate)
    if (call.find(allocates) != std::string::npos) throw std::runtime_error(std::string(kOutOfMemory) + call);
  throw std::runtime_error("sparse_ce: " + call + " failed; torch 2.13 or newer reports the reason");
}

}  // namespace sparse_ce

#undef TORCH_ERROR_CODE_CHECK
#define TORCH_ERROR_CODE_CHECK(call) \
  if ((call) != TORCH_SUCCESS) ::sparse_ce::raise_what_torch_said(#call);

#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/ops.h>

// The headers of torch 2.11 and 2.12 know the other macro alone.
#ifndef STABLE_TORCH_ERROR_CODE_CHECK
#define STABLE_TORCH_ERROR_CODE_CHECK(call) TORCH_ERROR_CODE_CHECK(call)
#endif
