// cuda_calls_runtime.h - Declares what the stand-in for the CUDA runtime counts.
#pragma once

#include <atomic>
#include <cstdint>
#include <cuda_runtime_api.h>

extern thread_local int current_device;
extern std::atomic<int64_t> queries, requests, launches;
extern std::atomic<bool> fails;  // queries and requests return cudaErrorInvalidValue
extern std::atomic<cudaError_t> last_error;
extern int asked_of[128];
// Returns the shared memory that a kernel has requested on the current device.
int64_t bytes_of(const void* kernel);
