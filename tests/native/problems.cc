#include "problems.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <utility>

namespace jax_scan::fuzz {
namespace {

constexpr DType kTypes[] = {DType::kF16, DType::kBF16, DType::kF32,
                            DType::kF64, DType::kC64,  DType::kC128};
constexpr DType kStates[] = {DType::kF32, DType::kF64, DType::kC64, DType::kC128};

DType state_of(DType t) { return byte_size(t) == 2 ? DType::kF32 : t; }

int64_t product(const std::vector<int64_t>& sizes, size_t begin, size_t end) {
  int64_t n = 1;
  for (size_t k = begin; k < end; ++k) n *= sizes[k];
  return n;
}

bool one_step(const Case& c, Slot slot) {
  return slot == kH0 || slot == kInit || slot == kFinal || (slot == kDaOut && c.da_over_time);
}

// The array's size in axis k.
int64_t size_of(const Case& c, Slot slot, size_t k) {
  const Array& array = c.arrays[slot];
  if (k == c.axis && one_step(c, slot)) return 1;
  if (!((array.broadcast >> k) & 1)) return c.sizes[k];
  return (array.repeated >> k) & 1 ? std::min<int64_t>(array.copies, c.sizes[k]) : 1;
}

int64_t count(const Case& c, Slot slot) {
  int64_t n = 1;
  for (size_t k = 0; k < c.sizes.size(); ++k) n *= size_of(c, slot, k);
  return n;
}

int element_bytes(const Case& c, Slot slot) {
  return slot == kReset ? 1 : byte_size(c.arrays[slot].dtype);
}

void append(Broadcast::Axis* axes, int32_t& count, Broadcast::Axis axis) {
  if (axis.size == 1) return;
  if (count > 0 && axis.stride == axes[count - 1].stride * axes[count - 1].size) {
    axes[count - 1].size *= axis.size;
  } else {
    axes[count++] = axis;
  }
}

// As core/operands.cc finds them.
Broadcast strides(const Case& c, Slot slot) {
  Broadcast at;
  int64_t stride = 1;
  for (size_t k = c.sizes.size(); k-- > 0;) {
    const int64_t size = size_of(c, slot, k);
    const int64_t here = size == 1 || (c.arrays[slot].broadcast >> k) & 1 ? 0 : stride;
    if (k == c.axis) {
      at.time_stride = here;
    } else if (k > c.axis) {
      append(at.inner, at.inner_axes, {c.sizes[k], here});
    } else {
      append(at.outer, at.outer_axes, {c.sizes[k], here});
    }
    stride *= size;
  }
  return at;
}

// ---- Random choices ----

int64_t draw_size(Random& random, int64_t most) {
  if (most <= 1) return most;
  const double kind = random.unit();
  if (kind < 0.45) {  // around the widths and lengths at which kernels change
    constexpr int64_t kEdges[] = {4,   8,   16,   32,   64,   96,   128,   192,  256,
                                  384, 512, 1024, 2048, 4096, 8192, 16384, 65536};
    int fitting = 0;
    while (fitting < 17 && kEdges[fitting] - 1 <= most) ++fitting;
    if (fitting > 0) {
      const int64_t n = kEdges[random.pick(0, fitting - 1)] + random.pick(-1, 1);
      return std::min(n, most);
    }
  }
  if (kind < 0.65) return random.pick(1, std::min<int64_t>(most, 9));
  return std::min(most, static_cast<int64_t>(std::exp(random.unit() * std::log(most + 1.0))));
}

// Axes whose sizes multiply to n.
std::vector<int64_t> draw_axes(Random& random, int64_t n) {
  std::vector<int64_t> axes;
  const double kind = random.unit();
  int64_t more = kind < 0.6 ? 0 : kind < 0.85 ? 1 : random.pick(0, 5);
  if (n == 1 && random.chance(0.6)) return axes;
  for (; more > 0; --more) {
    const int64_t d = random.pick(1, 8);
    if (n % d != 0) continue;
    axes.push_back(d);
    n /= d;
  }
  axes.insert(axes.begin() + random.pick(0, static_cast<int64_t>(axes.size())), n);
  return axes;
}

DType draw_readable(Random& random, DType state) {
  for (;;) {
    const DType t = kTypes[random.pick(0, 5)];
    if (readable(t, state)) return t;
  }
}

// Now and then, sizes with which the kernels sum da over the last axis or over the last before
// time.
bool draw_sum(Case& c, const Limits& limits) {
  Random random(c.seed ^ 0x9e3779b97f4a7c15u);  // other cases stay what they were
  if (!random.chance(0.03)) return false;
  const auto fill_up = [&](int64_t channels, int64_t have) {
    return (channels + have - 1) / have + random.pick(0, 2);
  };
  if (random.chance(0.5)) {
    const int64_t run = 32 * random.pick(1, 9), beside = random.chance(0.5) ? 1 : random.pick(2, 3);
    c.sizes = {fill_up(4096, run * beside), 1, beside, run};
    c.axis = 1;
    c.arrays[kDaOut].broadcast = 1u << 3;
  } else {
    const int64_t run = 4 * random.pick(1, 12), inner = 32 * random.pick(1, 9);
    c.sizes = {fill_up(8192, run * inner), run, 1, inner};
    c.axis = 2;
    c.arrays[kDaOut].broadcast = 1u << 1;
  }
  const int64_t most = limits.largest_bytes / byte_size(c.state) / c.elements();
  c.sizes[c.axis] = random.pick(1, std::clamp<int64_t>(most, 1, 70));
  if (random.chance(0.5)) c.sizes[c.axis] = (c.sizes[c.axis] + 7) / 8 * 8;
  return true;
}

// Now and then, runs of outer indices or of neighbouring channels, of any size, over which the CPU
// kernel may sum da.
bool draw_runs(Case& c, const Limits& limits) {
  Random random(c.seed ^ 0xd1342543de82ef95u);
  if (!limits.runs || !random.chance(0.15)) return false;
  const auto draw_time = [&](int64_t longest) {
    const int64_t most = limits.largest_bytes / byte_size(c.state) / c.elements();
    c.sizes[c.axis] = random.pick(1, std::clamp<int64_t>(most, 1, longest));
  };
  if (random.chance(0.35)) {
    const int64_t run = random.chance(0.8) ? random.pick(2, 9) : random.pick(10, 200);
    const int64_t outer = random.pick(1, 3), most = limits.largest_bytes / 16 / (outer * run);
    c.sizes = {outer, run, 1,
               draw_size(random, std::min<int64_t>(most, random.chance(0.1) ? 3000 : 300))};
    c.axis = 2;
    c.arrays[kDaOut].broadcast = 1u << 1;
    draw_time(random.chance(0.5) ? 6000 : 400);
    return true;
  }
  int64_t run = random.pick(16, random.chance(0.5) ? 300 : 1500);
  if (random.chance(0.6)) run = run / 16 * 16;
  c.sizes = {random.pick(1, 4), 1, random.chance(0.5) ? 1 : random.pick(2, 4), run};
  c.axis = 1;
  c.arrays[kDaOut].broadcast = 1u << 3;
  draw_time(random.chance(0.1) ? 4000 : 200);
  return true;
}

// Now and then, what the pipeline sums over outer indices: all of these, in full rows, with time
// enough for several tiles.
bool draw_stacks(Case& c, const Limits& limits) {
  Random random(c.seed ^ 0x8cb92ba72f3d8dd7u);
  if (!random.chance(0.04)) return false;
  // Wide and few, they are as many as there are blocks and more.
  const bool many = random.chance(0.3);
  const int64_t inner = 32 * (many                 ? 64
                              : random.chance(0.6) ? random.pick(1, 9)
                                                   : random.pick(32, 80));
  const int64_t more = many ? 0 : random.pick(0, 2);
  c.sizes = {4 * ((8192 + 4 * inner - 1) / (4 * inner) + more), 1, inner};
  c.axis = 1;
  c.arrays[kDaOut].broadcast = 1u << 0;
  const int64_t most = limits.largest_bytes * 3 / 2 / byte_size(c.state) / c.elements();
  const int64_t longest = std::clamp<int64_t>(most, 1, 700);
  c.sizes[1] = many && random.chance(0.6) ? longest : random.pick(1, longest);
  if (random.chance(0.3)) c.sizes[1] = (c.sizes[1] + 63) / 64 * 64;
  return true;
}

// Now and then, whole rows of many channels, of which a or the resets are the same for some.
bool draw_rows(Case& c, const Limits& limits) {
  Random random(c.seed ^ 0xa0761d6478bd642fu);
  if (!random.chance(0.06)) return false;
  c.sizes = {random.pick(1, 5), 1, 8 * random.pick(8, random.chance(0.5) ? 16 : 80)};
  c.axis = 1;
  const int64_t most = limits.largest_bytes / byte_size(c.state) / c.elements();
  c.sizes[1] = random.pick(1, std::clamp<int64_t>(most, 1, 200));
  if (random.chance(0.6)) c.sizes[1] = (c.sizes[1] + 7) / 8 * 8;
  return true;
}
constexpr uint32_t kOuter = 1u << 0, kTime = 1u << 1, kInner = 1u << 2;
void share_rows(Case& c) {
  Random random(c.seed ^ 0xe7037ed1a0b428dbu);
  constexpr uint32_t kOfA[] = {0, kOuter, kInner, kInner | kOuter, kTime, kTime | kOuter};
  constexpr uint32_t kOfReset[] = {kInner, kInner | kOuter, kOuter, kInner | kTime};
  c.arrays[kA].broadcast = kOfA[random.pick(0, 5)];
  c.arrays[kReset].broadcast = kOfReset[random.chance(0.8) ? 0 : random.pick(1, 3)];
}

// Now and then, few channels in whole rows with so much time that this is cut into many tiles.
// `shared`: fewer of them, of which a is the same for some, or for all of time.
bool draw_tiles(Case& c, const Limits& limits, bool& shared) {
  Random random(c.seed ^ 0xb5ad4eceda1ce2a9u);
  shared = !random.chance(0.004);
  if (shared && !Random(c.seed ^ 0x2545f4914f6cdd1du).chance(0.015)) return false;
  const int64_t inner = random.pick(8, 80);
  c.sizes = {std::max<int64_t>(random.pick(1, shared ? 200 : 1600) / inner, 1), 1, inner};
  c.axis = 1;
  const int64_t most = limits.largest_bytes / byte_size(c.state) / c.elements();
  c.sizes[1] = random.pick(1, std::clamp<int64_t>(most, 1, 8000));
  return true;
}

// And da summed over time, if a is the same for all of it.
void share_tiles(Case& c) {
  Random random(c.seed ^ 0x9fb21c651e98df25u);
  constexpr uint32_t kOfA[] = {kOuter, kInner,         kInner | kOuter,
                               kTime,  kTime | kOuter, kTime | kInner};
  c.arrays[kA].broadcast = kOfA[random.pick(0, 5)];
  Array& da = c.arrays[kDaOut];
  if (!da.present) return;
  c.da_over_time = c.time() > 1 && (c.arrays[kA].broadcast & kTime);
  da.dtype = c.da_over_time && random.chance(0.8) ? c.state : c.arrays[kA].dtype;
}

// Arrays (outer, time, inner) in full, but for resets, which are the same for all inner indices.
void fill_rows(Case& c) {
  for (Array& array : c.arrays) {
    array.repeated = array.broadcast = 0;
    array.skip = 0;
  }
  c.arrays[kReset].broadcast = 1u << 2;
}

// Now and then, channels by themselves whose time is contiguous: a few long ones, of which time is
// all that can be split.
bool draw_lines(Case& c, const Limits& limits) {
  Random random(c.seed ^ 0xc2b2ae3d27d4eb4fu);
  if (!random.chance(0.05)) return false;
  const int64_t most = limits.largest_bytes / byte_size(c.state) / 3;
  c.sizes = {random.pick(1, 3), random.pick(1, std::clamp<int64_t>(most, 1, 20000)), 1};
  if (random.chance(0.3)) {  // or as many as there are multiprocessors, and more
    const int64_t channels = random.pick(60, 300);
    c.sizes = {channels, random.pick(1, std::clamp<int64_t>(most / channels, 1, 5000)), 1};
  }
  c.axis = 1;
  return true;
}

// Now and then, a few neighbouring channels with much time, which the CPU kernel cuts into blocks.
// `plain`: of one type, nothing broadcast and no resets, and no more channels than it does that
// for.
bool draw_blocks(Case& c, const Limits& limits, bool& plain) {
  Random random(c.seed ^ 0xd6e8feb86659fd93u);
  if (!limits.blocks || !random.chance(0.04)) return false;
  plain = random.chance(0.5);
  const bool odd = !plain && random.chance(0.5);  // chunks instead
  const int64_t outer = odd ? random.pick(1, 3) : 1;
  int64_t inner = odd ? random.pick(4, 63) : 16 * random.pick(1, 4);
  if (plain) inner = std::min<int64_t>(8 << random.pick(0, 3), 256 / byte_size(c.state));
  const int64_t least = (int64_t{1} << (odd ? 17 : 16)) / inner / outer;
  const int64_t most = limits.largest_bytes / byte_size(c.state) / inner / outer;
  c.sizes = {outer, random.pick(least, std::clamp(most, least, 2 * least)), inner};
  c.axis = 1;
  return true;
}

// Problems for cuda/resident.cuh: few channels, in rows and lines, with time for several pieces.
bool draw_waves(Case& c, const Limits& limits) {
  Random random(c.seed ^ 0xff51afd7ed558ccdu);
  if (!limits.waves || c.op == Op::kTangent || !random.chance(0.5)) return false;
  constexpr int64_t kWidths[] = {1, 1, 2, 4, 8, 16, 32, 36, 64, 100};
  const int64_t outer = random.chance(0.5) ? 1 : random.pick(2, 5),
                inner = kWidths[random.pick(0, 9)];
  const int64_t most = limits.largest_bytes / 4 / outer / inner;
  const double scale = random.unit();
  int64_t time =
      static_cast<int64_t>(256 * std::pow(static_cast<double>(most) / 256, scale * scale));
  if (random.chance(0.8)) time = (time + 3) / 4 * 4;
  c.state = DType::kF32;
  c.sizes = {outer, std::clamp<int64_t>(time, 1, most), inner};
  c.axis = 1;
  return true;
}

// ---- Values ----

struct Range {
  double denormal, normal, largest, large;
};
Range range_of(DType t) {
  switch (t) {
    case DType::kF16:
      return {0x1p-24, 0x1p-14, 65504, 3e4};
    case DType::kBF16:
      return {0x1p-133, 0x1p-126, 0x1.fep127, 1e30};
    case DType::kF32:
    case DType::kC64:
      return {0x1p-149, 0x1p-126, 0x1.fffffep127, 1e30};
    default:
      return {0x1p-1074, 0x1p-1022, 0x1.fffffffffffffp1023, 1e200};
  }
}

double special(Random& random, const Range& range, bool finite) {
  const double sign = random.chance(0.5) ? 1 : -1;
  switch (random.pick(0, finite ? 6 : 8)) {
    case 0:
      return 0.0;
    case 1:
      return -0.0;
    case 2:
      return sign * range.denormal * static_cast<double>(random.pick(1, 9));
    case 3:
      return sign * range.normal * random.unit();
    case 4:
      return sign * range.large;
    case 5:
      return sign / range.large;
    case 6:
      return sign * range.largest;
    case 7:
      return sign * std::numeric_limits<double>::infinity();
    default:
      return std::numeric_limits<double>::quiet_NaN();
  }
}

// A factor's magnitude and sign; a complex one's direction is any.
double factor(Random& random, const Case& c) {
  const double u = random.unit();
  if (c.values == Values::kGrowing) return (random.chance(0.2) ? -1 : 1) * (0.7 + 0.8 * u);
  switch (c.factors) {
    case 0:
      return 1.6 * u - 0.8;
    case 1:
      return u < 0.02 ? 0 : (random.chance(0.1) ? -1 : 1) * (1 - 0.3 * u * u);
    case 2:
      return random.chance(0.1) ? -1 : 1;
    default:
      return 1 - 0.001 * u;
  }
}

Complex128 draw_value(Random& random, const Case& c, Slot slot, const Range& range, bool complex) {
  if (c.density > 0 && random.chance(c.density)) {
    const bool finite = c.values != Values::kSpecial;
    const double re = special(random, range, finite);
    if (!complex) return {re};
    return {re, random.chance(0.5) ? special(random, range, finite) : 2 * random.unit() - 1};
  }
  Complex128 v(2 * random.unit() - 1, complex ? 2 * random.unit() - 1 : 0);
  if (slot == kA) {
    const double size = factor(random, c);
    if (complex) {
      const double norm = std::sqrt(v.re * v.re + v.im * v.im) + 1e-9;
      v = {v.re / norm * size, v.im / norm * size};
    } else {
      v = {size};
    }
  }
  double scale = 1;
  if (c.values == Values::kMixed) {
    const int64_t kind = random.pick(0, 5);
    scale = kind == 0 ? range.large : kind == 1 ? 1 / range.large : 1;
  } else if (c.values == Values::kSmall && slot != kA) {
    scale = 16 * range.normal;
  } else if (c.values == Values::kZeros && slot == kA) {
    scale = random.chance(0.1) ? range.large : 1;
  } else if (c.values == Values::kZeros) {
    scale = random.chance(0.9) ? 0 : 1e4 * range.normal;
  }
  return {v.re * scale, v.im * scale};
}

template <class T>
void fill_with(const Case& c, Slot slot, unsigned char* to, int64_t elements) {
  Random random(c.seed + (static_cast<uint64_t>(slot) + 1) * 0x9e3779b97f4a7c15u);
  random.next();
  const Range range = range_of(c.arrays[slot].dtype);
  const bool complex = is_complex(c.arrays[slot].dtype);
  for (int64_t k = 0; k < elements; ++k) {
    const T value = store_as<T>(draw_value(random, c, slot, range, complex));
    std::memcpy(to + k * sizeof(T), &value, sizeof(T));
  }
}

// ---- What is expected ----

template <class R, int N>
struct Number {
  R v[N] = {};
};

// The finite components'.
template <class R, int N>
R norm(const Number<R, N>& x) {
  if constexpr (N == 1) return std::isfinite(x.v[0]) ? std::fabs(x.v[0]) : R(0);
  R sum = 0;
  for (const R v : x.v) sum += std::isfinite(v) ? v * v : R(0);
  return std::sqrt(sum);
}

// A sum of products as the state's type has it, whatever the order of its operations.
template <class R>
class Sum {
 public:
  Sum() = default;
  Sum(R largest, R normal) : largest_(largest), normal_(normal) {}

  // Either is exact or known to within a tolerance, in which case its sign may be unknown too.
  void product(R p, R q, R tolerance) {
    const R t = p * q;
    if (std::isfinite(t)) {
      const R size = std::fabs(p), lower = size * (std::fabs(q) - tolerance);
      if (lower > 2 * largest_) {
        (t > 0 ? big_positive_ : big_negative_) = true;
      } else {
        sum_ += t;
        magnitude_ += size * (std::fabs(q) + tolerance);
      }
    } else if (std::isnan(p) || std::isnan(q)) {
      nan_ = true;
    } else {  // an infinity times ...
      const R other = std::isinf(p) ? q : p, unsure = std::isinf(p) ? tolerance : R(0);
      if (std::isinf(other)) {
        (t > 0 ? positive_ : negative_) = true;
      } else if (other == 0 && unsure == 0) {
        nan_ = true;
      } else if (std::fabs(other) <= unsure || std::fabs(other) < normal_) {
        open_ = true;
      } else {
        ((p > 0) == (q > 0) ? positive_ : negative_) = true;
      }
    }
  }
  void add(R x, R tolerance) { product(R(1), x, tolerance); }
  // Adds a product that has become infinite, if it was ever rounded.
  void add_beyond(bool is_positive) { (is_positive ? big_positive_ : big_negative_) = true; }
  bool beyond() const {
    return !nan_ && !positive_ && !negative_ && (big_positive_ || big_negative_);
  }

  // False: it depends.
  bool get(R& out) const {
    out = sum_;
    if (nan_ || (positive_ && negative_)) {
      out = std::numeric_limits<R>::quiet_NaN();
      return true;
    }
    if (open_ || !(magnitude_ <= R(0.99) * largest_)) return false;
    const bool up = positive_ || big_positive_, down = negative_ || big_negative_;
    if (up && down) return false;
    if (up) out = std::numeric_limits<R>::infinity();
    if (down) out = -std::numeric_limits<R>::infinity();
    return true;
  }

 private:
  R largest_ = 0, normal_ = 0;
  R sum_ = 0, magnitude_ = 0;
  bool nan_ = false, positive_ = false, negative_ = false, open_ = false;
  bool big_positive_ = false, big_negative_ = false;  // finite, but not in the state's type
};

// A number that the kernel computes, and what is known of its error.
template <class R, int N>
struct Known {
  Number<R, N> value;
  R squares = 0;        // sum of the squares of roundings, each as large as it has become by now
  R linear = 0;         // their sum
  R lost = 0;           // by underflow
  R largest = 0;        // the largest number that went into it, as large as it has become by now
  R ever = 0;           // the largest number since the last cut
  bool beyond[N] = {};  // infinite as a product only, which may be added to before it is rounded
  bool open = false;
};

// The same for each component.
template <class R, int N>
class Sums {
 public:
  Sums(R largest, R normal) {
    for (Sum<R>& part : parts_) part = Sum<R>(largest, normal);
  }
  void add(const Number<R, N>& x, R tolerance) {
    for (int k = 0; k < N; ++k) parts_[k].add(x.v[k], tolerance);
  }
  void product(const Number<R, N>& p, const Number<R, N>& q, R tolerance) {
    parts_[0].product(p.v[0], q.v[0], tolerance);
    if constexpr (N == 2) {
      parts_[0].product(-p.v[1], q.v[1], tolerance);
      parts_[1].product(p.v[0], q.v[1], tolerance);
      parts_[1].product(p.v[1], q.v[0], tolerance);
    }
  }
  void add(const Known<R, N>& x, R tolerance) {
    for (int k = 0; k < N; ++k) {
      if (x.beyond[k]) {
        parts_[k].add_beyond(x.value.v[k] > 0);
      } else {
        parts_[k].add(x.value.v[k], tolerance);
      }
    }
  }
  bool beyond(int k) const { return parts_[k].beyond(); }
  bool get(Number<R, N>& out) const {
    bool certain = true;
    for (int k = 0; k < N; ++k) certain = parts_[k].get(out.v[k]) && certain;
    return certain;
  }

 private:
  Sum<R> parts_[N];
};

// The result's element of type `t` that stands for `x`.
double rounded(DType t, DType state, double x) {
  switch (t) {
    case DType::kF16:
      return load_as<float>(store_as<Float16>(static_cast<float>(x)));
    case DType::kBF16:
      return load_as<float>(store_as<BFloat16>(static_cast<float>(x)));
    case DType::kF32:
    case DType::kC64:
      return static_cast<float>(x);
    default:
      return is_double(state) ? x : static_cast<float>(x);
  }
}

template <class R>
void read(const unsigned char* base, DType t, int64_t k, R* re, R* im) {
  const auto as = [&](auto tag) {
    using T = typename decltype(tag)::type;
    T x;
    std::memcpy(&x, base + k * static_cast<int64_t>(sizeof(T)), sizeof(T));
    return x;
  };
  *im = 0;
  switch (t) {
    case DType::kF16:
      *re = load_as<float>(as(Tag<Float16>{}));
      return;
    case DType::kBF16:
      *re = load_as<float>(as(Tag<BFloat16>{}));
      return;
    case DType::kF32:
      *re = as(Tag<float>{});
      return;
    case DType::kF64:
      *re = as(Tag<double>{});
      return;
    case DType::kC64: {
      const Complex64 z = as(Tag<Complex64>{});
      *re = z.re, *im = z.im;
      return;
    }
    case DType::kC128: {
      const Complex128 z = as(Tag<Complex128>{});
      *re = z.re, *im = z.im;
      return;
    }
  }
}

bool unwritten(const unsigned char* element, int bytes) {
  for (int k = 0; k < bytes; ++k) {
    if (element[k] != kPoison) return false;
  }
  return true;
}

template <class R, int N>
class Oracle {
 public:
  using Value = Number<R, N>;
  using Kept = Known<R, N>;

  Oracle(const Case& c, const Pointers& operands, std::span<Results> results, bool flushed)
      : case_(c), results_(results) {
    const Range range = range_of(c.state);
    unit_ = is_double(c.state) ? 0x1p-53 : 0x1p-24;
    largest_ = range.largest;
    normal_ = range.normal;
    grain_ = flushed ? range.normal : range.denormal;
    for (int slot = 0; slot < kSlots; ++slot) {
      const Array& array = c.arrays[slot];
      if (!array.present) continue;
      if (flushed && slot != kReset) {
        grain_ = std::max<R>(grain_, range_of(array.dtype).normal);
        normal_ = std::max(normal_, grain_);
      }
      if (slot >= kFirstResult) continue;
      ways_[slot] = {operands[slot], array.dtype, strides(c, static_cast<Slot>(slot)), 0};
    }
    if (c.arrays[kDaOut].present && c.inner_run() * c.outer_run() > 1) {
      inner_run_ = c.inner_run();
      outer_run_ = c.outer_run();
      run_ = R(inner_run_ * outer_run_);
      over_runs_.assign(count(c, kDaOut), Total(largest_, normal_));
    }
    // With the same number in each step, roundings are no independent ones.
    const auto steady = [&](Slot slot) {
      return ways_[slot].data && ways_[slot].at.time_stride == 0;
    };
    steady_ = steady(kA) || steady(kX) || (steady(kDa) && steady(kH));
  }

  Compared run() {
    for (int64_t o = 0; o < case_.outer(); ++o) {
      for (int64_t i = 0; i < case_.inner(); ++i) walk(o, i);
    }
    for (size_t k = 0; k < over_runs_.size(); ++k) {
      emit(kDaOut, static_cast<int64_t>(k), over_runs_[k].get(*this, run_));
    }
    return compared_;
  }

 private:
  struct Way {
    const unsigned char* data = nullptr;
    DType dtype = DType::kF32;
    Broadcast at;
    int64_t offset = 0;
  };

  // A sum of da over several steps or channels, in any order.
  struct Total {
    Total(R largest, R normal) : terms(largest, normal) {}
    void add(const Oracle& oracle, const Kept& d) {
      const R d_tolerance = oracle.tolerance(d);
      terms.add(d, d_tolerance);
      sum.open = sum.open || d.open;
      tolerance += d_tolerance + 2 * oracle.grain_;
      for (int c = 0; c < N; ++c) {
        if (std::isfinite(d.value.v[c])) sum.value.v[c] += d.value.v[c];
      }
      most_partial = std::max({most_partial, norm(sum.value), norm(d.value)});
    }
    Kept get(const Oracle& oracle, R roundings) {
      sum.open = !terms.get(sum.value) || sum.open;
      sum.largest = most_partial;
      sum.lost = (tolerance + 10 * oracle.unit_ * roundings * most_partial) / 2;
      return sum;
    }

    Sums<R, N> terms;
    Kept sum;
    R most_partial = 0, tolerance = 0;
  };

  Value get(Slot slot, int64_t t) const {
    Value out;
    const Way& way = ways_[slot];
    if (!way.data) return out;
    R im;
    read(way.data, way.dtype, way.offset + t * way.at.time_stride, &out.v[0],
         N == 2 ? &out.v[N - 1] : &im);
    return out;
  }

  R tolerance(const Kept& x) const {
    return unit_ * (steady_ ? 5 * x.linear : 10 * std::sqrt(x.squares)) + 2 * x.lost;
  }
  void put_largest(Kept& x, R part) const {
    x.largest = std::max(part, norm(x.value));
    x.ever = std::max(x.ever, x.largest);
  }
  // One more rounding.
  void round(Kept& x) const {
    x.squares += x.largest * x.largest;
    x.linear += x.largest;
  }
  void scale_errors(Kept& x, R by) const {
    x.squares *= by * by;
    x.linear *= by;
    x.lost *= by;
    x.largest *= by;
  }
  Kept exact(const Value& value) const {
    Kept x;
    x.value = value;
    put_largest(x, 0);
    x.lost = grain_ > range_of(case_.state).denormal && x.largest > 0 ? grain_ : R(0);
    return x;
  }

  void walk(int64_t o, int64_t i) {
    for (int slot = 0; slot < kFirstResult; ++slot) {
      Way& way = ways_[slot];
      if (way.data) way.offset = way.at.outer_offset(o) + way.at.inner_offset(i);
    }
    const int64_t time = case_.time(), inner = case_.inner(), channel = o * inner + i;
    const bool cotangent = case_.op == Op::kCotangent;
    const bool descending = cotangent != case_.reverse;
    Kept s = exact(get(kInit, 0));
    Total over_time(largest_, normal_);
    for (int64_t k = 0; k < time; ++k) {
      const int64_t t = descending ? time - 1 - k : k;
      const int64_t before = case_.reverse ? t + 1 : t - 1;
      const bool first = before < 0 || before >= time;
      const Way& reset = ways_[kReset];
      const bool cut = (first && !case_.has_h0) ||
                       (reset.data && reset.data[reset.offset + t * reset.at.time_stride] != 0);
      const Value a = get(kA, t), x = get(kX, t);
      const Value past = first ? get(kH0, 0) : get(kH, before);
      const int64_t at = (o * time + t) * inner + i;
      if (cotangent) {
        // u = x + s; da = u h_prev; s <- a u
        Sums<R, N> sums(largest_, normal_);
        sums.add(x, 0);
        sums.add(s, tolerance(s));
        s.open = !sums.get(s.value) || s.open;
        put_largest(s, std::max(s.largest, norm(x)));
        round(s);
        s.lost += 2 * grain_;
        emit(kY, at, s);
        const R u_tolerance = tolerance(s);

        if (case_.arrays[kDaOut].present) {
          Kept d;
          if (!cut) {
            Sums<R, N> products(largest_, normal_);
            products.product(past, s.value, u_tolerance);
            d.open = !products.get(d.value) || s.open;
            for (int c = 0; c < N; ++c) d.beyond[c] = products.beyond(c);
            const R h = norm(past);
            d.squares = s.squares * h * h;
            d.linear = s.linear * h;
            d.lost = s.lost * h + grain_ * (1 + h + norm(s.value));
            put_largest(d, s.largest * h);
            round(d);
          }
          if (case_.da_over_time) {
            over_time.add(*this, d);
          } else if (!over_runs_.empty()) {
            over_runs_[((o / outer_run_) * time + t) * (inner / inner_run_) + i / inner_run_].add(
                *this, d);
          } else {
            emit(kDaOut, at, d);
          }
        }
        if (cut) {
          s = Kept();
        } else {
          step(s, a, {}, {}, {}, false);
        }
      } else if (cut) {
        s = exact(x);
        emit(kY, at, s);
      } else {
        step(s, a, x, get(kDa, t), past, true);
        emit(kY, at, s);
      }
    }
    if (case_.arrays[kDaOut].present && case_.da_over_time) {
      emit(kDaOut, channel, over_time.get(*this, steady_ ? R(time) : std::sqrt(R(time))));
    }
    emit(kFinal, channel, s);
  }

  // s <- a s + da past + x
  void step(Kept& s, const Value& a, const Value& x, const Value& da, const Value& past,
            bool has_input) const {
    const R tolerance_before = tolerance(s);
    Sums<R, N> sums(largest_, normal_);
    sums.product(a, s.value, tolerance_before);
    if (has_input) {
      sums.add(x, 0);
      if (case_.arrays[kDa].present) sums.product(da, past, 0);
    }
    s.open = !sums.get(s.value) || s.open;
    for (int k = 0; k < N; ++k) s.beyond[k] = sums.beyond(k);
    const R by = norm(a), left = norm(da), right = norm(past);
    scale_errors(s, by);
    put_largest(s, std::max(s.largest, norm(x) + left * right));
    round(s);
    // Numbers lose up to a grain; a product of factors may vanish below the smallest normal number.
    s.lost += grain_ * (2 + by + left + right) + normal_ * s.ever;
  }

  void emit(Slot slot, int64_t index, const Kept& x) {
    const Array& array = case_.arrays[slot];
    if (!array.present) return;
    const int bytes = byte_size(array.dtype);
    ++compared_.elements;
    const R allowed = tolerance(x);
    const bool open = x.open || !(allowed < largest_);
    if (open) ++compared_.open;
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    const int components = is_complex(array.dtype) ? N : 1;
    double low[N], high[N];
    for (int c = 0; c < components; ++c) {
      const R want = x.value.v[c];
      low[c] = high[c] = static_cast<double>(want);
      if (open) low[c] = -kInfinity, high[c] = kInfinity;
      if (open || !std::isfinite(want)) continue;
      low[c] = rounded(array.dtype, case_.state, static_cast<double>(want - allowed));
      high[c] = rounded(array.dtype, case_.state, static_cast<double>(want + allowed));
    }
    for (Results& result : results_) {
      if (!result.failure.empty()) continue;
      const unsigned char* const element = result.at[slot] + index * bytes;
      if (unwritten(element, bytes)) {
        result.failure = std::string(name(slot)) + place(slot, index) + " is not written";
        continue;
      }
      if (open) continue;
      double got[2];
      read(element, array.dtype, 0, &got[0], &got[1]);
      for (int c = 0; c < components; ++c) {
        const double want = static_cast<double>(x.value.v[c]);
        if (std::isnan(want) ? !std::isnan(got[c]) : !(low[c] <= got[c] && got[c] <= high[c])) {
          char text[200];
          std::snprintf(text, sizeof(text), "%s%s%s is %.9g, expected %.9g, bound %.3g", name(slot),
                        place(slot, index).c_str(), c == 1 ? ".imag" : "", got[c], want,
                        static_cast<double>(allowed));
          result.failure = text;
          break;
        }
        // What the result's own rounding leaves; nothing is learned where much is lost.
        const double error = std::fabs(got[c] - want);
        const double beyond = error - std::fabs(rounded(array.dtype, case_.state, want) - want);
        const auto bound = static_cast<double>(allowed), left = static_cast<double>(2 * x.lost);
        const double normal = range_of(array.dtype).normal;
        if (!std::isfinite(error) || left > 0.1 * bound || x.largest < 1e4 * normal) continue;
        double& worst = result.error[static_cast<int>(array.dtype)];
        worst = std::max(worst, error / static_cast<double>(x.largest));
        if (beyond > 0) result.of_bound = std::max(result.of_bound, beyond / bound);
      }
    }
  }

  std::string place(Slot slot, int64_t index) const {
    const int64_t time = one_step(case_, slot) ? 1 : case_.time();
    const int64_t inner = case_.inner() / (slot == kDaOut ? case_.inner_run() : 1);
    return "[" + std::to_string(index / inner / time) + ", " +
           std::to_string(index / inner % time) + ", " + std::to_string(index % inner) + "]";
  }

  const Case& case_;
  std::span<Results> results_;
  R unit_, largest_, normal_, grain_;
  bool steady_ = false;
  int64_t inner_run_ = 1, outer_run_ = 1;
  R run_ = 1;
  std::vector<Total> over_runs_;  // in the order of da_out
  Way ways_[kFirstResult];
  Compared compared_;
};

// ---- Smaller cases ----

// The kernels' callers could ask for it: the rules at the end of `decode` in core/operands.cc.
bool valid(const Case& c) {
  const auto has = [&](Slot slot) { return c.arrays[slot].present; };
  if (!has(kA)) return false;
  const bool past = has(kH) && (!c.has_h0 || has(kH0));
  if (c.da_over_time && (!has(kDaOut) || c.time() < 2)) return false;
  if (c.da_over_time && c.inner_run() * c.outer_run() > 1) return false;
  switch (c.op) {
    case Op::kScan:
      return has(kX) && has(kInit) == c.has_h0 && (has(kY) || has(kFinal));
    case Op::kTangent:
      return has(kY) && (!has(kDa) || past) && (!has(kInit) || c.has_h0);
    case Op::kCotangent:
      return (has(kY) || has(kDaOut) || has(kFinal)) && (!has(kDaOut) || past) &&
             (!has(kFinal) || c.has_h0);
  }
  return false;
}

}  // namespace

uint64_t Random::next() {
  uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}
double Random::unit() { return static_cast<double>(next() >> 11) * 0x1p-53; }
int64_t Random::pick(int64_t low, int64_t high) {
  return low + static_cast<int64_t>(next() % static_cast<uint64_t>(high - low + 1));
}

const char* name(Slot slot) {
  constexpr const char* kNames[] = {"a",    "x",     "da", "h",      "h0",
                                    "init", "reset", "y",  "da_out", "final"};
  return kNames[slot];
}
const char* name(Values values) {
  constexpr const char* kNames[kValuesCount] = {"plain", "growing", "finite", "special",
                                                "mixed", "small",   "zeros"};
  return kNames[static_cast<int>(values)];
}

int64_t Case::outer() const { return product(sizes, 0, axis); }
int64_t Case::inner() const { return product(sizes, axis + 1, sizes.size()); }
int64_t Case::inner_run() const { return run(axis + 1, sizes.size()); }
int64_t Case::outer_run() const { return run(0, axis); }
int64_t Case::run(size_t begin, size_t end) const {
  int64_t run = 1;
  for (size_t k = begin; k < end; ++k) {
    if (sizes[k] > 0) run *= sizes[k] / size_of(*this, kDaOut, k);
  }
  return run;
}
int64_t Case::bytes(Slot slot) const {
  return arrays[slot].present ? count(*this, slot) * element_bytes(*this, slot) : 0;
}
int64_t Case::skipped_bytes(Slot slot) const {
  return arrays[slot].skip * element_bytes(*this, slot);
}

Problem Case::problem(const Pointers& at) const {
  Problem p;
  p.op = op;
  p.state = state;
  p.outer = outer();
  p.time = time();
  p.inner = inner();
  p.reverse = reverse;
  p.has_h0 = has_h0;
  p.da_over_time = da_over_time;
  p.da_inner_run = inner_run();
  p.da_outer_run = outer_run();
  Input* const inputs[] = {&p.a, &p.x, &p.da, &p.h, &p.h0, &p.init, &p.reset};
  Output* const outputs[] = {&p.y, &p.da_out, &p.final};
  for (int slot = 0; slot < kSlots; ++slot) {
    if (!arrays[slot].present) continue;
    if (slot < kFirstResult) {
      *inputs[slot] = {at[slot], arrays[slot].dtype, strides(*this, static_cast<Slot>(slot))};
    } else {
      *outputs[slot - kFirstResult] = {at[slot], arrays[slot].dtype};
    }
  }
  return p;
}

std::string Case::text() const {
  constexpr const char* kOps[] = {"scan", "tangent", "cotangent"};
  const auto shape = [&](auto&& size) {
    std::string text = "(";
    for (size_t k = 0; k < sizes.size(); ++k) text += (k ? "," : "") + std::to_string(size(k));
    return text + ")";
  };
  std::string text = std::string(kOps[static_cast<int>(op)]) + " of " +
                     shape([&](size_t k) { return sizes[k]; }) + " over axis " +
                     std::to_string(axis) + (reverse ? ", reverse" : "") +
                     (has_h0 ? ", with h0" : "") + ", state " + jax_scan::name(state) +
                     ", values " + name(values) + " " + std::to_string(factors);
  for (int k = 0; k < kSlots; ++k) {
    const auto slot = static_cast<Slot>(k);
    const Array& array = arrays[k];
    if (!array.present) continue;
    text += std::string("; ") + name(slot) + " " +
            (slot == kReset ? "bool" : jax_scan::name(array.dtype)) +
            shape([&](size_t j) { return size_of(*this, slot, j); });
    if (array.repeated) text += " repeated";
    if (array.skip) text += " at +" + std::to_string(array.skip);
  }
  return text;
}

Case draw(uint64_t seed, const Limits& limits) {
  Random random(seed);
  Case c;
  c.seed = seed;
  c.op = static_cast<Op>(random.pick(0, 2));
  c.reverse = random.chance(0.5);
  c.has_h0 = random.chance(0.5);

  // Types. Kernels of their own serve calls of one type, and a float32 with 16-bit b and h.
  const double kind = random.unit();
  DType type = kTypes[random.chance(0.2) ? 2 : random.pick(0, 5)], of_a = type;
  if (kind < 0.12) {
    type = random.chance(0.8) ? DType::kBF16 : DType::kF16;
    of_a = DType::kF32;
  }
  bool free = kind > 0.7;
  c.state = free ? kStates[random.pick(0, 3)] : state_of(type);

  // Sizes: most calls are small.
  const double extent = random.unit();
  int64_t most = extent < 0.7 ? 2048 : extent < 0.95 ? 30000 : extent < 0.9995 ? 300000 : INT64_MAX;
  most = std::min(most, limits.largest_bytes / byte_size(c.state));
  int64_t size[3] = {1, 1, 1};
  int order[] = {0, 1, 2};
  for (int k = 2; k > 0; --k) std::swap(order[k], order[random.pick(0, k)]);
  for (const int k : order) {
    size[k] = draw_size(random, most);
    most /= size[k];
  }
  if (limits.empty && random.chance(0.005)) size[random.pick(0, 2)] = 0;
  c.sizes = draw_axes(random, size[0]);
  c.axis = c.sizes.size();
  c.sizes.push_back(size[1]);
  for (const int64_t n : draw_axes(random, size[2])) c.sizes.push_back(n);
  bool plain = false;
  const bool few = draw_lines(c, limits) || draw_blocks(c, limits, plain);
  const bool waves = !few && draw_waves(c, limits);
  plain = plain || waves;
  constexpr DType kReal[] = {DType::kF32, DType::kF32, DType::kBF16, DType::kF16};
  if (plain) type = of_a = waves ? kReal[c.seed % 4] : c.state;
  free = free && !plain;
  const bool may_sum = !few && !waves && limits.sums && c.op == Op::kCotangent && !free;
  const bool stacks = may_sum && draw_stacks(c, limits);
  const bool may_run = !few && !waves && c.op == Op::kCotangent;
  const bool sums = stacks || (may_sum && draw_sum(c, limits)) || (may_run && draw_runs(c, limits));
  const bool streams = !few && !waves && !sums && !free && c.op != Op::kTangent;
  bool shared = false;
  const bool tiles = streams && draw_tiles(c, limits, shared);
  const bool rows = streams && !tiles && draw_rows(c, limits);

  // Values.
  const double values = random.unit();
  c.values = values < 0.55   ? Values::kPlain
             : values < 0.65 ? Values::kGrowing
             : values < 0.75 ? Values::kFinite
             : values < 0.87 ? Values::kSpecial
             : values < 0.93 ? Values::kMixed
             : values < 0.96 ? Values::kSmall
                             : Values::kZeros;
  c.factors = static_cast<int>(random.pick(0, 3));
  if (c.values == Values::kFinite || c.values == Values::kSpecial) {
    constexpr double kDensities[] = {0.0005, 0.005, 0.05, 0.3};
    c.density = kDensities[random.pick(0, 3)];
  }
  constexpr double kCuts[] = {0, 0.002, 0.1, 0.9};
  c.cuts = kCuts[random.pick(0, 3)];

  // Arrays.
  const double full = random.chance(0.4) || plain ? 1.0 : random.chance(0.5) ? 0.9 : 0.6;
  const bool aligned = random.chance(0.7), spread = random.chance(0.05);
  const auto place = [&](Array& array, DType dtype) {
    array.present = true;
    array.dtype = dtype;
    array.skip = aligned || random.chance(0.5) ? 0 : static_cast<int>(random.pick(1, 7));
  };
  const auto input = [&](Slot slot, DType dtype) {
    Array& array = c.arrays[slot];
    place(array, free && !one_step(c, slot) ? draw_readable(random, c.state) : dtype);
    for (size_t k = 0; k < c.sizes.size(); ++k) {
      if (random.chance(full)) continue;
      array.broadcast |= 1u << k;
      if (spread && k != c.axis && c.sizes[k] > 1 && random.chance(0.5)) array.repeated |= 1u << k;
    }
    array.copies = static_cast<int>(random.pick(2, 4));
  };
  const auto output = [&](Slot slot, DType dtype) {
    place(c.arrays[slot], free && !one_step(c, slot) ? draw_readable(random, c.state) : dtype);
  };
  const bool scan = c.op == Op::kScan, tangent = c.op == Op::kTangent,
             cotangent = c.op == Op::kCotangent;
  input(kA, of_a);
  if (scan || random.chance(0.85)) input(kX, type);
  if (scan ? c.has_h0 : cotangent ? random.chance(0.6) : c.has_h0 && random.chance(0.7)) {
    input(kInit, c.state);
  }
  if (random.chance(plain ? 0.0 : few ? 0.1 : 0.35)) {
    input(kReset, DType::kF32);
    // As callers mostly have them: the same for all inner indices.
    if (random.chance(0.4)) {
      c.arrays[kReset].broadcast = c.arrays[kReset].repeated = 0;
      for (size_t k = c.axis + 1; k < c.sizes.size(); ++k) c.arrays[kReset].broadcast |= 1u << k;
    }
  }
  if (tangent && random.chance(0.8)) input(kDa, of_a);
  if (cotangent && (random.chance(0.8) || sums)) {
    c.da_over_time = c.time() > 1 && random.chance(0.35) && !sums;
    output(kDaOut, c.da_over_time || random.chance(0.1) ? c.state : of_a);
    if (c.da_over_time && !free && random.chance(0.5)) c.arrays[kDaOut].dtype = of_a;
  }
  if (c.arrays[kDa].present || c.arrays[kDaOut].present) {
    input(kH, type);
    if (c.has_h0) input(kH0, c.state);
  }
  if (tangent || random.chance(0.85) || (cotangent && !c.arrays[kDaOut].present && !c.has_h0)) {
    output(kY, type);
  }
  const bool needed = !c.arrays[kY].present && !c.arrays[kDaOut].present;
  if (cotangent ? c.has_h0 && (needed || random.chance(0.7)) : needed || random.chance(0.5)) {
    output(kFinal, c.state);
  }
  if (rows || tiles || waves) fill_rows(c);
  if (rows) share_rows(c);
  if (tiles && shared) share_tiles(c);
  if (stacks) {
    fill_rows(c);
    c.arrays[kA].broadcast = c.arrays[kDaOut].broadcast = kOuter;
    if (Random(c.seed ^ 0x589965cc75374cc3u).chance(0.7)) c.arrays[kDaOut].dtype = c.state;
  }
  // As where da is summed: it has the shape of a.
  if (sums && Random(c.seed ^ 0x8ebc6af09c88c6e3u).chance(0.5)) {
    for (Array& array : c.arrays) {
      array.repeated = 0;
      array.skip = 0;
    }
    c.arrays[kX].broadcast = c.arrays[kH].broadcast = 0;
    c.arrays[kA].broadcast = c.arrays[kDaOut].broadcast;
  }
  return c;
}

void fill(const Case& c, Slot slot, unsigned char* to) {
  const Array& array = c.arrays[slot];
  if (!array.present) return;
  const int64_t elements = count(c, slot);
  if (slot == kReset) {
    Random random(c.seed ^ 0x5bd1e995u);
    for (int64_t k = 0; k < elements; ++k) to[k] = random.chance(c.cuts) ? 1 : 0;
  } else {
    switch (array.dtype) {
      case DType::kF16:
        fill_with<Float16>(c, slot, to, elements);
        break;
      case DType::kBF16:
        fill_with<BFloat16>(c, slot, to, elements);
        break;
      case DType::kF32:
        fill_with<float>(c, slot, to, elements);
        break;
      case DType::kF64:
        fill_with<double>(c, slot, to, elements);
        break;
      case DType::kC64:
        fill_with<Complex64>(c, slot, to, elements);
        break;
      case DType::kC128:
        fill_with<Complex128>(c, slot, to, elements);
        break;
    }
  }
  // Of repeated entries the first is read.
  if (!array.repeated) return;
  const int bytes = element_bytes(c, slot);
  for (int64_t k = 0; k < elements; ++k) {
    int64_t rest = k;
    bool first = true;
    for (size_t j = c.sizes.size(); j-- > 0;) {
      const int64_t size = size_of(c, slot, j);
      if ((array.repeated >> j) & 1 && rest % size != 0) first = false;
      rest /= size;
    }
    if (!first) std::memset(to + k * bytes, kPoison, bytes);
  }
}

Compared compare(const Case& c, const Pointers& operands, std::span<Results> results,
                 bool flushed) {
  switch (c.state) {
    case DType::kF64:
      return Oracle<long double, 1>(c, operands, results, flushed).run();
    case DType::kC64:
      return Oracle<double, 2>(c, operands, results, flushed).run();
    case DType::kC128:
      return Oracle<long double, 2>(c, operands, results, flushed).run();
    default:
      return Oracle<double, 1>(c, operands, results, flushed).run();
  }
}

Case shrink(Case c, const std::function<bool(const Case&)>& fails) {
  int left = 400;  // attempts
  const auto attempt = [&](auto&& change) {
    Case smaller = c;
    change(smaller);
    if (left <= 0 || !valid(smaller) || smaller.text() == c.text()) return false;
    --left;
    if (!fails(smaller)) return false;
    c = std::move(smaller);
    return true;
  };
  for (bool smaller = true; smaller && left > 0;) {
    smaller = false;
    for (size_t k = 0; k < c.sizes.size(); ++k) {
      smaller |= attempt([&](Case& x) { x.sizes[k] = 1; });
      while (attempt([&](Case& x) { x.sizes[k] = (x.sizes[k] + 1) / 2; })) smaller = true;
      for (const int64_t by : {64, 8, 1}) {
        while (attempt([&](Case& x) { x.sizes[k] = std::max<int64_t>(1, x.sizes[k] - by); })) {
          smaller = true;
        }
      }
    }
    for (int slot = 0; slot < kSlots; ++slot) {
      smaller |= attempt([&](Case& x) { x.arrays[slot].present = false; });
      smaller |= attempt([&](Case& x) { x.arrays[slot].broadcast = 0; });
      smaller |= attempt([&](Case& x) { x.arrays[slot].repeated = 0; });
      smaller |= attempt([&](Case& x) { x.arrays[slot].skip = 0; });
    }
    smaller |= attempt([&](Case& x) {
      x.has_h0 = false;
      x.arrays[kH0].present = x.arrays[kInit].present = x.arrays[kFinal].present = false;
    });
    smaller |= attempt([&](Case& x) { x.reverse = false; });
    smaller |= attempt([&](Case& x) { x.da_over_time = false; });
    smaller |= attempt([&](Case& x) {
      x.values = Values::kPlain;
      x.density = 0;
    });
    smaller |= attempt([&](Case& x) { x.factors = 0; });
  }
  return c;
}

void Report::count(const Case& c) {
  ++problems;
  ++ops[static_cast<int>(c.op)];
  ++values[static_cast<int>(c.values)];
  ++states[static_cast<int>(c.state)];
  ++types[static_cast<int>(c.arrays[kA].dtype)];
}

void Report::count_call(const std::string& label) {
  for (auto& [known, n] : calls) {
    if (known == label) {
      ++n;
      return;
    }
  }
  calls.emplace_back(label, 1);
}

void Report::add(const Results& results) {
  for (size_t k = 0; k < error.size(); ++k) error[k] = std::max(error[k], results.error[k]);
  of_bound = std::max(of_bound, results.of_bound);
}

void Report::merge(const Report& other) {
  problems += other.problems;
  failures += other.failures;
  compared.elements += other.compared.elements;
  compared.open += other.compared.open;
  for (size_t k = 0; k < ops.size(); ++k) ops[k] += other.ops[k];
  for (size_t k = 0; k < values.size(); ++k) values[k] += other.values[k];
  for (size_t k = 0; k < states.size(); ++k) states[k] += other.states[k];
  for (size_t k = 0; k < types.size(); ++k) types[k] += other.types[k];
  for (size_t k = 0; k < error.size(); ++k) error[k] = std::max(error[k], other.error[k]);
  of_bound = std::max(of_bound, other.of_bound);
  for (const auto& [label, n] : other.calls) {
    count_call(label);
    for (auto& [known, sum] : calls) {
      if (known == label) sum += n - 1;
    }
  }
}

std::string Report::json(const std::string& platform, uint64_t seed, double seconds) const {
  std::string text = "{\"platform\": \"" + platform + "\", \"seed\": " + std::to_string(seed) +
                     ", \"problems\": " + std::to_string(problems) +
                     ", \"failures\": " + std::to_string(failures) +
                     ", \"elements\": " + std::to_string(compared.elements) +
                     ", \"left_open\": " + std::to_string(compared.open);
  const auto object = [&](const char* label, auto&& members) {
    text += std::string(", \"") + label + "\": {";
    const char* comma = "";
    members([&](const std::string& key, const auto& value) {
      char number[40];
      if constexpr (std::is_floating_point_v<std::decay_t<decltype(value)>>) {
        std::snprintf(number, sizeof(number), "%.3g", value);
      } else {
        std::snprintf(number, sizeof(number), "%lld", static_cast<long long>(value));
      }
      text += comma + ("\"" + key + "\": " + number);
      comma = ", ";
    });
    text += "}";
  };
  object("operations", [&](auto&& put) {
    put("scan", ops[0]), put("tangent", ops[1]), put("cotangent", ops[2]);
  });
  object("calls", [&](auto&& put) {
    for (const auto& [label, n] : calls) put(label, n);
  });
  object("values", [&](auto&& put) {
    for (size_t k = 0; k < values.size(); ++k) put(name(static_cast<Values>(k)), values[k]);
  });
  object("states", [&](auto&& put) {
    for (const DType t : kStates) put(jax_scan::name(t), states[static_cast<int>(t)]);
  });
  object("types_of_a", [&](auto&& put) {
    for (const DType t : kTypes) put(jax_scan::name(t), types[static_cast<int>(t)]);
  });
  object("largest_error", [&](auto&& put) {
    for (const DType t : kTypes) put(jax_scan::name(t), error[static_cast<int>(t)]);
  });
  char end[100];
  std::snprintf(end, sizeof(end), ", \"largest_part_of_bound\": %.3g, \"seconds\": %.1f}", of_bound,
                seconds);
  return text + end;
}

}  // namespace jax_scan::fuzz
