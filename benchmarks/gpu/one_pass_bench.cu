// one_pass_bench.cu - Times the ways to compute a loss and its gradient next to a copy of the logits: every form of the
// one-pass kernel, forward alone, and two kernels. Also compares their results bitwise. tests/emulation/build.py
// compiles it for a GPU and for the emulation.
//
// usage: one_pass_bench [ROWS CLASSES ROUNDS]     prints medians; exits with 1 if results differ that must be equal
#include "../../csrc/cuda/device/launch.cuh"
#include "../../csrc/cuda/launchers.h"
#include "../../csrc/cuda/row_plan.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace sparse_ce {
namespace {

using cuda::OnePass;

constexpr int64_t kDrawnRows = 64;  // repeated to fill all rows, because drawing takes longer than measuring

void must(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::printf("CUDA error in %s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}

// Owns device memory.
class Buffer {
 public:
  explicit Buffer(int64_t bytes) : bytes_(bytes) {
    if (bytes > 0) must(cudaMalloc(&data_, static_cast<size_t>(bytes)), "malloc");
  }
  ~Buffer() { cudaFree(data_); }
  Buffer(const Buffer&) = delete;

  template <typename T = void>
  T* get() const {
    return static_cast<T*>(data_);
  }
  int64_t bytes() const { return bytes_; }
  void fill(int byte) const { must(cudaMemset(data_, byte, static_cast<size_t>(bytes_)), "memset"); }
  std::vector<char> download() const {
    std::vector<char> host(static_cast<size_t>(bytes_));
    must(cudaMemcpy(host.data(), data_, host.size(), cudaMemcpyDeviceToHost), "download");
    return host;
  }
  // Fills the buffer with repetitions of `drawn`.
  template <typename T>
  void repeat(const std::vector<T>& drawn) const {
    const auto step = static_cast<int64_t>(drawn.size() * sizeof(T));
    for (int64_t at = 0; at < bytes_; at += step)
      must(cudaMemcpy(get<char>() + at, drawn.data(), static_cast<size_t>(std::min(step, bytes_ - at)),
                      cudaMemcpyHostToDevice),
           "upload");
  }

 private:
  int64_t bytes_;
  void* data_ = nullptr;
};

// Measures the time of work on the device. The emulation has no events, and launches run to their end.
class Stopwatch {
 public:
#if defined(__CUDACC__)
  Stopwatch() { must(cudaEventCreate(&begin_), "event"), must(cudaEventCreate(&end_), "event"); }
  void start() { must(cudaEventRecord(begin_), "event"); }
  double milliseconds() {
    float elapsed = 0;
    must(cudaEventRecord(end_), "event"), must(cudaEventSynchronize(end_), "a kernel");
    must(cudaEventElapsedTime(&elapsed, begin_, end_), "event");
    return elapsed;
  }

 private:
  cudaEvent_t begin_, end_;
#else
  void start() { begin_ = std::chrono::steady_clock::now(); }
  double milliseconds() {
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin_).count();
  }

 private:
  std::chrono::steady_clock::time_point begin_;
#endif
};

template <typename bits_t>
__global__ void count_differing_kernel(const bits_t* a, const bits_t* b, int64_t count, unsigned long long* differing) {
  unsigned long long mine = 0;
  for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < count; i += int64_t(gridDim.x) * blockDim.x)
    mine += a[i] != b[i];
  if (mine > 0) atomicAdd(differing, mine);
}

// Returns how many numbers differ in their bits.
template <typename bits_t>
int64_t differing(const Buffer& a, const Buffer& b) {
  const Buffer count(sizeof(unsigned long long));
  count.fill(0);
  must(cuda::launch(nullptr, 1024, 256, count_differing_kernel<bits_t>, a.get<const bits_t>(), b.get<const bits_t>(),
                    a.bytes() / int64_t(sizeof(bits_t)), count.get<unsigned long long>()),
       "comparison");
  unsigned long long found;
  std::memcpy(&found, count.download().data(), sizeof(found));
  return static_cast<int64_t>(found);
}

// Holds the logits and the target of a problem.
struct Problem {
  const int64_t rows, classes, entries;  // entries per row; 1 means a class index
  Buffer indices, values, grad_output;
  CrossEntropyArgs args{};

  Problem(const Buffer& logits, int64_t rows, int64_t classes, int64_t entries)
      : rows(rows), classes(classes), entries(entries), indices(rows * entries * int64_t(sizeof(int64_t))),
        values(rows * entries * int64_t(sizeof(float))), grad_output(sizeof(float)) {
    std::mt19937_64 random(static_cast<uint64_t>(entries));
    std::vector<int64_t> drawn(static_cast<size_t>(kDrawnRows * entries));
    std::vector<float> weights(drawn.size());
    for (auto& index : drawn) index = static_cast<int64_t>(random() % static_cast<uint64_t>(classes));
    for (auto& weight : weights)
      weight = static_cast<float>(random() % 1000 + 1) / (1000 * static_cast<float>(entries));
    indices.repeat(drawn), values.repeat(weights);
    grad_output.repeat(std::vector<float>{1 / static_cast<float>(rows)});
    args.logits = logits.get(), args.dtype = DType::kBFloat16;
    args.rows = rows, args.vocab = args.row_stride = classes;
    TargetView& target = args.target;
    target.indices = indices.get(), target.indices_dtype = DType::kInt64;
    target.values = entries > 1 ? values.get() : nullptr, target.values_dtype = DType::kFloat32;
    target.labels = entries == 1;
    target.rows = rows, target.entries = rows * entries, target.width = entries;
    target.num_classes = classes, target.ignore_index = -100;
  }
};

// Holds the results of one way, but for the gradient. They are NaN until they are written, each way with other bits.
struct Results {
  const Buffer loss, lse, residual;
  ForwardArgs forward{};
  BackwardArgs backward{};

  Results(const Problem& p, const Buffer& gradient, Reads reads, int poison)
      : loss(p.rows * 4), lse(p.rows * 4), residual(p.rows * 4) {
    static_cast<CrossEntropyArgs&>(forward) = static_cast<CrossEntropyArgs&>(backward) = p.args;
    forward.reads = backward.reads = reads;
    forward.loss = loss.get(), forward.lse = lse.get(), forward.lse_residual = residual.get();
    backward.lse = lse.get(), backward.lse_residual = residual.get();
    backward.grad_loss = p.grad_output.get(), backward.grad_logits = gradient.get();
    backward.grad_row_stride = p.classes;
    for (const Buffer* each : {&loss, &lse, &residual}) each->fill(poison);
  }
  int64_t differing(const Results& other) const {
    return sparse_ce::differing<uint32_t>(loss, other.loss) + sparse_ce::differing<uint32_t>(lse, other.lse) +
           sparse_ce::differing<uint32_t>(residual, other.residual);
  }
};

struct Form {
  std::string name;
  OnePass plan;
};

// Returns the forms of the one-pass kernel for a planned one: resident clusters that loop over rows, and one row per
// cluster.
std::vector<Form> forms_of(const OnePass& planned) {
  std::vector<Form> found;
  for (const bool persistent : {true, false}) {
    OnePass form = planned;
    form.persistent = persistent;
    found.push_back({persistent ? "one pass, persistent" : "one pass, a row per cluster", form});
    if (persistent == planned.persistent) found.back().name += ", planned";
  }
  return found;
}

struct Work {
  std::string name;
  std::function<cudaError_t()> run;
};

// Runs all works by turns, and prints their medians in units of the first one.
void measure(const std::vector<Work>& works, int rounds) {
  constexpr int kWarmUp = 2;
  Stopwatch watch;
  std::vector<std::vector<double>> times(works.size());
  for (int round = -kWarmUp; round < rounds; ++round)
    for (size_t i = 0; i < works.size(); ++i) {
      watch.start();
      must(works[i].run(), works[i].name.c_str());
      const double elapsed = watch.milliseconds();
      if (round >= 0) times[i].push_back(elapsed);
    }
  for (auto& each : times) std::sort(each.begin(), each.end());
  const auto median = [&](size_t i) { return times[i][times[i].size() / 2]; };
  for (size_t i = 0; i < works.size(); ++i)
    std::printf("  %-40s %8.4f ms (%.4f to %.4f) %6.3f copies\n", works[i].name.c_str(), median(i), times[i].front(),
                times[i].back(), median(i) / median(0));
}

// Returns how many results differ that must be equal: the gradients of `form` and of backward_kernel, which gets the
// losses of `form`, and the losses of `form` with and without a gradient. `first` has the losses of another form.
int64_t compare(const Problem& p, const Form& form, const Results& first, const Buffer& gradient, const Buffer& other,
                const Buffer& space) {
  const Results once(p, gradient, Reads::kPlanned, 0xFE), alone(p, gradient, Reads::kPlanned, 0xFD);
  gradient.fill(0xFE), other.fill(0xFF);
  must(cuda::cross_entropy_one_pass(form.plan, once.forward, &once.backward, nullptr), form.name.c_str());
  must(cuda::cross_entropy_one_pass(form.plan, alone.forward, nullptr, nullptr), "forward alone");
  BackwardArgs backward = once.backward;
  backward.grad_logits = other.get();
  must(cuda::cross_entropy_backward(backward, space.get(), nullptr), "backward");
  const int64_t gradients = differing<uint16_t>(gradient, other), losses = once.differing(alone),
                forms = once.differing(first);
  std::printf("  %s: %lld gradients differ from backward_kernel, %lld losses from forward alone, %lld from %s\n",
              form.name.c_str(), static_cast<long long>(gradients), static_cast<long long>(losses),
              static_cast<long long>(forms), "the planned form");
  return gradients + losses + forms;
}

// Compares and measures. Returns how many results differ that must be equal.
int64_t run(const Problem& p, const Buffer& logits, const Buffer& gradient, const Buffer& other, int rounds) {
  const OnePass planned = cuda::one_pass_of(p.args);
  std::printf("K = %lld%s, %d blocks with %d packs per thread\n", static_cast<long long>(p.entries),
              p.entries == 1 ? " (class index)" : ", unsorted", planned.cluster, planned.packs);
  if (!planned) {
    std::printf("  the one-pass kernel does not hold a row\n");
    return 1;
  }
  const Results once(p, gradient, Reads::kPlanned, 0xFE), apart(p, other, Reads::kApart, 0xFF);
  const Buffer space(int64_t(cuda::workspace_of(apart.backward)));
  const Buffer parts(int64_t(cuda::workspace_of(apart.forward)));
  const auto one_pass = [&](const OnePass& form) {
    return cuda::cross_entropy_one_pass(form, once.forward, &once.backward, nullptr);
  };
  const auto alone = [&](const OnePass& form) {
    return cuda::cross_entropy_one_pass(form, once.forward, nullptr, nullptr);
  };
  const auto forward = [&] { return cuda::cross_entropy_forward(apart.forward, parts.get(), nullptr); };
  const auto two_kernels = [&] {
    const cudaError_t error = forward();
    return error == cudaSuccess ? cuda::cross_entropy_backward(apart.backward, space.get(), nullptr) : error;
  };
  const auto copy = [&] {
    return cudaMemcpyAsync(gradient.get(), logits.get(), size_t(logits.bytes()), cudaMemcpyDeviceToDevice, nullptr);
  };

  const auto forms = forms_of(planned);
  std::vector<Work> works = {{"copy", copy}};
  must(one_pass(planned), "one pass");
  int64_t found = 0;
  for (const Form& form : forms) {
    found += compare(p, form, once, gradient, other, space);
    works.push_back({form.name, [&] { return one_pass(form.plan); }});
    works.push_back({form.name + ", forward alone", [&] { return alone(form.plan); }});
  }
  works.push_back({"two kernels", two_kernels});
  works.push_back({"two kernels, forward alone", forward});
  measure(works, rounds);
  std::printf("  two kernels: %lld losses differ by rounding\n", static_cast<long long>(apart.differing(once)));
  return found;
}

void print_device() {
#if defined(__CUDACC__)
  cudaDeviceProp about;
  must(cudaGetDeviceProperties(&about, 0), "properties");
  std::printf("%s, %d multiprocessors\n", about.name, about.multiProcessorCount);
#else
  std::printf("emulation on a CPU\n");
#endif
}

}  // namespace
}  // namespace sparse_ce

int main(int argc, char** argv) {
  using namespace sparse_ce;
  const int64_t rows = argc > 3 ? std::atoll(argv[1]) : 8192, classes = argc > 3 ? std::atoll(argv[2]) : 128256;
  const int rounds = argc > 3 ? std::atoi(argv[3]) : 11;
  print_device();
  std::printf("%lld x %lld bfloat16, %d rounds\n", static_cast<long long>(rows), static_cast<long long>(classes),
              rounds);
  std::mt19937_64 random(1);
  std::vector<uint16_t> drawn(static_cast<size_t>(kDrawnRows * classes));
  for (auto& bits : drawn) {  // uniform in [-6, 6); a bfloat16 is the upper half of a float
    const float x = static_cast<float>(random() >> 40) * (12.0f / (1 << 24)) - 6.0f;
    uint32_t whole;
    std::memcpy(&whole, &x, sizeof(whole));
    bits = static_cast<uint16_t>(whole >> 16);
  }
  const int64_t bytes = rows * classes * 2;
  const Buffer logits(bytes), gradient(bytes), other(bytes);
  logits.repeat(drawn);
  int64_t found = 0;
  for (const int64_t entries : {1, 64, 4096})
    found += run(Problem(logits, rows, classes, entries), logits, gradient, other, rounds);
  std::printf("%s\n", found == 0 ? "all results are equal" : "results DIFFER");
  return found != 0;
}
