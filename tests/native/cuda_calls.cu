// Counts the calls of the CUDA runtime that queries and launches make, with cuda_calls_runtime.cpp in place of the
// runtime. No kernel runs.
#include "../../csrc/cuda/device/launch_sharing.cuh"

#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "cuda_calls_runtime.h"

namespace {

__global__ void first_kernel(int) {}
__global__ void second_kernel(int) {}

void equal(const char* what, int64_t found, int64_t expected) {
  if (found == expected) return;
  std::printf("%s: %ld instead of %ld\n", what, long(found), long(expected));
  std::exit(1);
}

cudaError_t launch(void (*kernel)(int), int64_t most) {
  return sparse_ce::cuda::launch_sharing(nullptr, 1, 32, 1, 100, most, kernel, 0);
}

void check_attributes() {
  for (const int device : {0, 1, 0, 1, 100, 100}) {
    const bool kept = device < 64, first = asked_of[device] == 0;
    current_device = device, queries = 0;
    equal("multiprocessors", sparse_ce::cuda::device_attribute<cudaDevAttrMultiProcessorCount>(1), 10 + device);
    equal("queries of a device", queries, first || !kept);
    asked_of[device] = 1;
  }
  current_device = 2, fails = true;
  equal("an unknown attribute", sparse_ce::cuda::device_attribute<cudaDevAttrMultiProcessorCount>(7), 7);
  fails = false;
  equal("an attribute after a failure", sparse_ce::cuda::device_attribute<cudaDevAttrMultiProcessorCount>(7), 12);
}

void check_requests() {
  struct Step {
    int device;
    void (*kernel)(int);
    int64_t most, requests, bytes;
  };
  for (const Step& step : {Step{0, first_kernel, 50000, 2, 50000}, {0, first_kernel, 50000, 0, 50000},
                           {0, second_kernel, 60000, 2, 60000}, {0, first_kernel, 50000, 0, 50000},
                           {1, first_kernel, 50000, 2, 50000}, {1, first_kernel, 70000, 2, 70000},
                           {1, first_kernel, 50000, 0, 70000}, {0, first_kernel, 70000, 2, 70000}}) {
    current_device = step.device, requests = launches = 0;
    equal("a launch", launch(step.kernel, step.most), cudaSuccess);
    equal("requests of a launch", requests, step.requests);
    equal("launches", launches, 1);
    equal("bytes of a kernel", bytes_of(reinterpret_cast<const void*>(step.kernel)), step.bytes);
  }
  current_device = 3, fails = true, launches = 0, last_error = cudaErrorInvalidValue;
  equal("a refused launch", launch(first_kernel, 50000), cudaErrorInvalidValue);
  equal("launches after a refusal", launches, 0);
  equal("an error that is left", last_error, cudaSuccess);
  fails = false, requests = 0;
  equal("a launch after a refusal", launch(first_kernel, 50000), cudaSuccess);
  equal("requests after a refusal", requests, 2);
}

void check_threads() {
  requests = launches = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t)
    threads.emplace_back([t] {
      current_device = 4;
      for (int i = 0; i < 1000; ++i) launch(first_kernel, t % 2 ? 50000 : 90000);
    });
  for (std::thread& thread : threads) thread.join();
  equal("launches of threads", launches, 8000);
  if (requests != 2) equal("requests of threads", requests, 4);
  current_device = 4;
  equal("bytes after threads", bytes_of(reinterpret_cast<const void*>(first_kernel)), 90000);
}

}  // namespace

int main() {
  check_attributes();
  check_requests();
  check_threads();
  std::puts("passed");
}
