// Compares the element-wise kernels of the linear head with float64: accumulation and scaling.
#include "harness.h"

#include "../../csrc/cuda/linear.cu"

namespace sparse_ce {
namespace {

enum Kind { kSum, kScale };

struct Case {
  Kind kind;
  DType dtype, product_dtype;
  int64_t max_blocks;
  int64_t count, offset;            // elements of a sum or of a scaled row; elements before the first
  int64_t product_offset, low_offset;
  int64_t steps;                    // products per sum
  double size, special;             // of the products; share of elements with an infinity or NaN
  double scale;
  bool from_expected;               // a gradient for another grad_output,
  double expected;                  // which is this one
  int64_t rows, beside;             // scaled rows; elements between two of them

  bool touches_nothing() const { return from_expected ? scale == expected : scale == 1; }
  bool known() const {
    if (!from_expected) return true;
    const bool far = std::isfinite(scale) && std::fabs(scale / expected) >= std::ldexp(1, 40);
    return std::isfinite(expected) && expected != 0 && !far;
  }
  bool split() const { return kind == kSum && size_of(dtype) == 2; }
  std::string text() const {
    char out[320];
    std::snprintf(
        out, sizeof(out),
        "kind %d dtype %d product %d count %ld offsets %ld %ld %ld steps %ld size %g special %g scale %g / %d %g rows "
        "%ld %ld max_blocks %ld",
        kind, int(dtype), int(product_dtype), long(count), long(offset), long(product_offset), long(low_offset),
        long(steps), size, special, scale, from_expected, expected, long(rows), long(beside), long(max_blocks));
    return out;
  }
};

DType arithmetic(DType dtype) { return dtype == DType::kFloat64 ? dtype : DType::kFloat32; }

Case draw(bool small) {
  Case c{};
  c.kind = chance(0.7) ? kSum : kScale;
  c.dtype = one_of<DType>({DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16});
  if (c.kind == kSum && chance(0.4)) c.dtype = chance(0.5) ? DType::kFloat16 : DType::kBFloat16;
  c.product_dtype = arithmetic(c.dtype);
  if (c.dtype != DType::kFloat64 && chance(0.5)) c.product_dtype = chance(0.5) ? DType::kFloat16 : DType::kBFloat16;
  c.max_blocks = below(3);
  c.count = chance(0.03) ? 0 : 1 + below(chance(0.5) ? 40 : small ? 2500 : 6000);
  const bool aligned = chance(0.6);
  for (int64_t* offset : {&c.offset, &c.product_offset, &c.low_offset}) *offset = aligned ? 8 * below(3) : below(17);
  c.steps = 1 + below(small ? 3 : 6);
  c.size = one_of<double>({1e-11, 1, 60, 30000}), c.special = chance(0.3) ? 0.05 : 0;
  c.scale = one_of<double>({1, 1, 1.0000001192092896, -2.7, 0, INFINITY, double(NAN)});
  c.from_expected = chance(0.6);
  c.expected = one_of<double>({c.scale, 1, 1, 3, -0.25, 1e-13, -1e-20, 0, INFINITY, double(NAN)});
  if (c.kind == kScale) c.rows = chance(0.5) ? 1 : 2 + below(12), c.beside = c.rows == 1 ? 0 : below(9);
  return c;
}

std::string kind_of(const Case& c) {
  if (c.kind == kScale && c.touches_nothing()) return "scale of 1";
  if (c.kind == kScale) return c.rows == 1 ? c.from_expected ? "scale from another" : "scale" : "scale of rows";
  if (!c.split()) return "plain sum";
  const int64_t product_bytes = c.product_offset * size_of(c.product_dtype);
  const bool aligned = c.offset % 8 == 0 && product_bytes % 16 == 0 && (c.low_offset % 8 == 0 || c.steps == 1);
  return aligned && c.count >= 8 ? "split sum by packs" : "split sum by singles";
}

// Stores random bytes on host and device, after `offset` more.
class Bytes {
 public:
  Bytes(int64_t count, int64_t offset) : offset_(offset) {
    for (int64_t i = 0; i < offset + count; ++i) host.push_back(uint8_t(random_bits()));
    if (!host.empty()) must(cudaMalloc(&device_, host.size()), "malloc");
    upload();
  }
  ~Bytes() {
    if (device_) cudaFree(device_);
  }
  Bytes(const Bytes&) = delete;

  uint8_t* device() const { return static_cast<uint8_t*>(device_) + offset_; }
  uint8_t& operator[](int64_t i) { return host[size_t(offset_ + i)]; }
  void upload() {
    if (device_) must(cudaMemcpy(device_, host.data(), host.size(), cudaMemcpyHostToDevice), "upload");
  }
  void download() {
    if (device_) must(cudaMemcpy(host.data(), device_, host.size(), cudaMemcpyDeviceToHost), "download");
  }

  std::vector<uint8_t> host;

 private:
  int64_t offset_;
  void* device_ = nullptr;
};

// Returns the rounding error of a dtype for x, relative to x and near 0.
double rounding(DType dtype, double x) {
  switch (dtype) {
    case DType::kFloat16:
      return 0x1p-11 * std::fabs(x) + 0x1p-25;
    case DType::kBFloat16:
      return 0x1p-8 * std::fabs(x);
    case DType::kFloat32:
      return 0x1p-24 * std::fabs(x);
    default:
      return 0x1p-53 * std::fabs(x);
  }
}

// Compares with float64. Infinities, NaN and numbers beyond the range of float16 must be exact.
void compare_rounded(const char* what, int64_t step, int64_t i, DType dtype, double ours, double exact, double error) {
  if (!std::isfinite(exact)) return compare(what, step, i, ours, exact, 0);
  const double bound = error + rounding(dtype, exact) * (1 + 0x1p-20) + 1e-40, largest = 65520;
  if (dtype == DType::kFloat16 && std::fabs(exact) + error >= largest) {
    if (std::fabs(exact) - error >= largest || std::isinf(ours)) exact = std::copysign(INFINITY, exact);
  }
  compare(what, step, i, ours, exact, bound);
}

// ------------------------------------------------------------------------------------------------ accumulate

// Joins 24 bits, of which the total holds 16 and `low` 8: the upper bits of a float32, or for float16 a sign, 6
// exponent bits and 17 mantissa bits.
double joined(DType dtype, uint16_t high, uint8_t low) {
  const uint32_t all = uint32_t(high) << 8 | low;
  if (dtype == DType::kFloat16) {
    const int exponent = int(all >> 17 & 63);
    const double number = double(all & 0x1ffff) / 0x20000, sign = all >> 23 ? -1 : 1;
    if (exponent == 63) return number > 0 ? double(NAN) : sign * INFINITY;
    return exponent == 0 ? sign * 0.0 : sign * std::ldexp(1 + number, exponent - 37);
  }
  const uint32_t bits = all << 8;
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

void run_sum(const Case& c) {
  const bool has_low = c.split() && (c.steps > 1 || chance(0.5));
  Array total(c.dtype, c.count, c.offset);
  Bytes low(has_low ? c.count : 0, c.low_offset);
  for (int64_t i = -c.offset; i < c.count; ++i) total.set(i, 512);
  total.upload();
  const std::vector<uint8_t> low_before = low.host;
  std::vector<double> exact(size_t(c.count), 0), error(size_t(c.count), 0);
  for (int64_t step = 0; step < c.steps; ++step) {
    const bool last = step + 1 == c.steps;
    Array product(c.product_dtype, c.count, c.product_offset);
    for (int64_t i = 0; i < c.count; ++i)
      product.set(i, chance(c.special) ? one_of<double>({INFINITY, -INFINITY, double(NAN)}) : uniform(-c.size, c.size));
    product.upload();

    AccumulateArgs args{};
    args.product = product.device(), args.total = total.device(), args.low = has_low ? low.device() : nullptr;
    args.product_dtype = c.product_dtype, args.dtype = c.dtype, args.count = c.count;
    args.first = step == 0, args.last = last, args.max_blocks = c.max_blocks;
    must(cuda::accumulate(args, nullptr), "accumulate");
    total.download(), low.download();
    std::vector<uint16_t> high(size_t(c.split() ? c.count : 0));
    must(cudaMemcpy(high.data(), total.device(), high.size() * 2, cudaMemcpyDeviceToHost), "download");

    // Each step rounds once and, except for the last, keeps 16 mantissa bits. For float16 it keeps 18, and nothing
    // below 2^-36. Half a unit is 2^-16 or 2^-18.
    for (int64_t i = 0; i < c.count; ++i) {
      double& sum = exact[size_t(i)];
      double& off = error[size_t(i)];
      sum += product.get(i);
      const double size = std::fabs(sum) + off;
      const bool open = c.split() && !last;
      if (step > 0) off += rounding(arithmetic(c.dtype), size);
      if (open) off += (c.dtype == DType::kFloat16 ? 0x1p-18 : 0x1p-16) * (1 + 0x1p-10) * size;
      if (open && c.dtype == DType::kFloat16) off += 0x1p-36;
      if (open)
        compare_rounded("partial sum", step, i, DType::kFloat64, joined(c.dtype, high[size_t(i)], low[i]), sum, off);
      else
        compare_rounded("sum", step, i, c.dtype, total.get(i), sum, off);
    }
  }
  for (int64_t i = -c.offset; i < 0; ++i) compare("front of the total", 0, i, total.get(i), 512, 0);
  for (int64_t i = -c.low_offset; i < 0; ++i)
    compare("front of low", 0, i, low[i], low_before[size_t(c.low_offset + i)], 0);
}

// ------------------------------------------------------------------------------------------------ scale

void run_scale(const Case& c) {
  const int64_t stride = c.count + c.beside, count = c.rows * stride;
  Array scale(arithmetic(c.dtype), 1), expected(arithmetic(c.dtype), 1);
  Array values(c.dtype, count, c.offset), before(c.dtype, count, c.offset);
  scale.set(0, c.scale), expected.set(0, c.expected);
  for (int64_t i = -c.offset; i < count; ++i) {
    // 0 is the gradient of an ignored row, and stays 0 for every scale.
    const double x = chance(c.special) ? one_of<double>({INFINITY, -INFINITY, double(NAN)})
                     : chance(0.1)     ? 0
                                       : uniform(-60, 60);
    values.set(i, x), before.set(i, x);
  }
  scale.upload(), expected.upload(), values.upload();
  ScaleArgs args{};
  args.values = values.device(), args.dtype = c.dtype, args.scale = scale.device(), args.count = c.count;
  args.rows = c.rows, args.row_stride = stride, args.max_blocks = c.max_blocks;
  if (c.from_expected) args.expected = expected.device();
  must(cuda::scale(args, nullptr), "scale");
  values.download();
  for (int64_t i = -c.offset; i < 0; ++i) compare("front of the values", 0, i, values.get(i), before.get(i), 0);
  const bool known = c.known();
  const bool clears = c.from_expected && c.scale == 0;
  for (int64_t i = 0; i < count; ++i) {
    if (i % stride >= c.count) {
      compare("beside a row", i / stride, i % stride, values.get(i), before.get(i), 0);
      continue;
    }
    const double factor = c.from_expected ? scale.get(0) / expected.get(0) : scale.get(0);
    const double exact = !known                         ? NAN
                         : clears || before.get(i) == 0 ? 0
                                                        : before.get(i) * factor,
                 error = std::isfinite(exact) ? 2 * rounding(arithmetic(c.dtype), exact) : 0;
    compare_rounded("scaled value", i / stride, i % stride, c.dtype, values.get(i), exact, error);
  }
}

// Checks that a scale of 1 does not change any bits, not even the payload of a NaN.
void run_scale_of_one(const Case& c) {
  const int64_t size = size_of(c.dtype), stride = c.count + c.beside;
  Array scale(arithmetic(c.dtype), 1);
  Bytes values(c.rows * stride * size, c.offset * size);
  const std::vector<uint8_t> before = values.host;
  scale.set(0, c.scale), scale.upload();
  ScaleArgs args{};
  args.values = values.device(), args.dtype = c.dtype, args.scale = scale.device(), args.count = c.count;
  args.rows = c.rows, args.row_stride = stride, args.max_blocks = c.max_blocks;
  if (c.from_expected) args.expected = scale.device();
  must(cuda::scale(args, nullptr), "scale");
  values.download();
  for (size_t i = 0; i < before.size(); ++i) compare("byte", 0, int64_t(i), values.host[i], before[i], 0);
}

void run_case(const Case& c) {
  if (c.kind == kSum) return run_sum(c);
  c.touches_nothing() ? run_scale_of_one(c) : run_scale(c);
}

}  // namespace
}  // namespace sparse_ce

int main(int argc, char** argv) {
  using namespace sparse_ce;
  return run_seeds(argc, argv, draw, kind_of, run_case);
}
