// harness.h - Runs random cases with the real source of the CUDA kernels. g++ compiles it for emulation, plain and with
// sanitizers; nvcc compiles it for the device. See build.py.
//
// usage: <program> [--small] [--seeds FIRST LAST]     a case is its seed; a failure prints it and exits with 1
#pragma once

#if defined(__CUDACC__)
#include <cuda_runtime.h>
#else
#include "device/launch.cuh"
#endif

#include "../../csrc/core/dtype.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>

// nvcc also defines ::cuda. Code inside this namespace refers to sparse_ce::cuda.
namespace sparse_ce {
namespace {

uint64_t random_state = 1;
uint64_t random_bits() {  // splitmix64
  uint64_t z = (random_state += 0x9e3779b97f4a7c15u);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}
double uniform(double low, double high) {
  return low + (high - low) * double(random_bits() >> 11) / double(1ull << 53);
}
int64_t below(int64_t n) { return int64_t(random_bits() % uint64_t(n)); }
bool chance(double p) { return uniform(0, 1) < p; }
template <typename T>
T one_of(const std::vector<T>& choices) {
  return choices[size_t(below(int64_t(choices.size())))];
}

void must(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::printf("CUDA error in %s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}

// Stores numbers of one dtype on host and device. The device buffer ends exactly after `offset` + `count` elements, so
// that a sanitizer detects the first byte beyond it.
class Array {
 public:
  Array(DType dtype, int64_t count, int64_t offset = 0) : dtype_(dtype), offset_(offset), count_(count) {
    host_.resize(size_t((offset + count) * size_of(dtype)));
    if (!host_.empty()) must(cudaMalloc(&device_, host_.size()), "malloc");
  }
  ~Array() {
    if (device_) cudaFree(device_);
  }
  Array(const Array&) = delete;

  int64_t count() const { return count_; }
  DType dtype() const { return dtype_; }
  void* device() const { return static_cast<char*>(device_) + offset_ * size_of(dtype_); }
  void set(int64_t i, double x) {
    void* at = host_.data() + (offset_ + i) * size_of(dtype_);
    switch (dtype_) {
      case DType::kFloat64:
        *static_cast<double*>(at) = x;
        break;
      case DType::kFloat32:
        *static_cast<float*>(at) = float(x);
        break;
      case DType::kFloat16:
        *static_cast<__half*>(at) = __float2half_rn(float(x));
        break;
      case DType::kBFloat16:
        *static_cast<__nv_bfloat16*>(at) = __float2bfloat16_rn(float(x));
        break;
      case DType::kInt64:
        *static_cast<int64_t*>(at) = int64_t(x);
        break;
      case DType::kInt32:
        *static_cast<int32_t*>(at) = int32_t(x);
        break;
      case DType::kUInt8:
        *static_cast<uint8_t*>(at) = uint8_t(x);
        break;
    }
  }
  double get(int64_t i) const { return load_number<double>(host_.data(), dtype_, offset_ + i); }
  void upload() {
    if (device_) must(cudaMemcpy(device_, host_.data(), host_.size(), cudaMemcpyHostToDevice), "upload");
  }
  void download() {
    if (device_) must(cudaMemcpy(host_.data(), device_, host_.size(), cudaMemcpyDeviceToHost), "download");
  }

 private:
  DType dtype_;
  int64_t offset_, count_;
  std::vector<char> host_;
  void* device_ = nullptr;
};

int failures = 0;

void fail(const char* what, int64_t r, int64_t v, double ours, double exact, double bound) {
  if (failures++ < 5)
    std::printf("  %s row %ld column %ld: %.9g, exact %.9g, bound %.3g\n", what, long(r), long(v), ours, exact, bound);
}
void compare(const char* what, int64_t r, int64_t v, double ours, double exact, double bound) {
  if (std::isnan(exact) ? std::isnan(ours) : ours == exact || std::fabs(ours - exact) <= bound) return;
  fail(what, r, v, ours, exact, bound);
}
// Compares two kernels' results bitwise: 0 differs from -0. All NaN are equal, because a GPU has one NaN, and on a CPU
// the compiler chooses it.
void compare_bits(const char* what, int64_t r, int64_t v, double ours, double other) {
  if (std::isnan(ours) && std::isnan(other)) return;
  if (std::memcmp(&ours, &other, sizeof(double)) != 0) fail(what, r, v, ours, other, 0);
}

using Kinds = std::vector<std::string>;
Kinds kinds_of(const std::string& kind) { return {kind}; }
Kinds kinds_of(const Kinds& kinds) { return kinds; }

// Draws and runs a case for each seed. `draw(small)` returns a case with text(). `kind_of(case)` names the path of the
// kernels and other features that must be covered. A run that does not cover all of them proves less than it claims.
template <typename draw_t, typename kind_t, typename run_t>
int run_seeds(int argc, char** argv, const draw_t& draw, const kind_t& kind_of, const run_t& run_case) {
  bool small = false;
  uint64_t first = 1, last = 100;
  for (int i = 1; i < argc; ++i) {
    if (std::string(argv[i]) == "--small") small = true;
    if (std::string(argv[i]) == "--seeds" && i + 2 < argc)
      first = std::strtoull(argv[i + 1], nullptr, 10), last = std::strtoull(argv[i + 2], nullptr, 10);
  }
  std::map<std::string, int> seen;
  int bad = 0;
  for (uint64_t seed = first; seed <= last; ++seed) {
    random_state = seed * 1000003;
#if !defined(__CUDACC__)
    coc::options().seed = seed;
#endif
    const auto c = draw(small);
    const int before = failures;
    for (const std::string& kind : kinds_of(kind_of(c))) ++seen[kind];
#if defined(__CUDACC__)
    run_case(c);
#else
    try {
      run_case(c);
    } catch (const coc::KernelError& error) {
      ++failures;
      std::printf("  %s\n", error.what());
    }
#endif
    if (failures != before) {
      ++bad;
      std::printf("seed %llu failed: %s\n", static_cast<unsigned long long>(seed), c.text().c_str());
    }
  }
#if !defined(__CUDACC__)
  bad += coc::race_reports() != 0;
#endif
  for (const auto& kind : seen) std::printf("%s: %d cases\n", kind.first.c_str(), kind.second);
  std::printf("%d passed, %d failed\n", int(last - first + 1) - bad, bad);
  return bad != 0;
}

}  // namespace
}  // namespace sparse_ce
