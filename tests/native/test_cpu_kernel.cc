// Random problems through the CPU kernel against the written-out recurrence: all operations,
// element types, broadcasts and absent operands. Arrays are allocated to the byte, so
// AddressSanitizer sees any access beyond them; tiles run on several threads, so ThreadSanitizer
// sees any race. Usage: test_cpu_kernel [problems [seed]].
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "core/dtype.h"
#include "core/problem.h"
#include "cpu/kernel.h"
#include "cpu/parallel.h"

namespace jax_scan {
namespace {

using Dims = std::vector<int64_t>;
using Random = std::mt19937_64;

int64_t pick(Random& random, int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(random);
}
bool chance(Random& random, double p) { return std::bernoulli_distribution(p)(random); }

int64_t product(const Dims& dims, size_t begin, size_t end) {
  int64_t n = 1;
  for (size_t k = begin; k < end; ++k) n *= dims[k];
  return n;
}

// Memory aligned to a cache line, as XLA's is, or to one element beyond it.
struct Bytes {
  struct Free {
    void operator()(unsigned char* p) const { ::operator delete(p, std::align_val_t(64)); }
  };
  std::shared_ptr<unsigned char> memory;
  size_t size = 0;
  size_t skipped = 0;

  Bytes() = default;
  Bytes(size_t bytes, size_t skip)
      : memory(static_cast<unsigned char*>(::operator new(bytes + skip, std::align_val_t(64))),
               Free()),
        size(bytes),
        skipped(skip) {
    std::memset(data(), 0xa5, bytes);
  }
  unsigned char* data() const { return memory.get() + skipped; }
};

// An array of its own allocation, broadcast to the full shape where its dims are 1.
struct Array {
  Dims dims;
  DType dtype = DType::kF32;
  Bytes bytes;

  bool absent() const { return dims.empty(); }
  int64_t size() const { return product(dims, 0, dims.size()); }
};

// The element's index in `array` for the index (o, t, i) of the full shape.
int64_t locate(const Array& array, const Dims& full, size_t axis, int64_t o, int64_t t, int64_t i) {
  Dims index(full.size());
  for (size_t k = full.size(); k-- > axis + 1;) {
    index[k] = i % full[k];
    i /= full[k];
  }
  index[axis] = t;
  for (size_t k = axis; k-- > 0;) {
    index[k] = o % full[k];
    o /= full[k];
  }
  int64_t at = 0;
  for (size_t k = 0; k < full.size(); ++k) {
    at = at * array.dims[k] + (array.dims[k] == 1 ? 0 : index[k]);
  }
  return at;
}

void append(Broadcast::Axis* axes, int32_t& count, Broadcast::Axis axis) {
  if (axis.size == 1) return;
  if (count > 0 && axis.stride == axes[count - 1].stride * axes[count - 1].size) {
    axes[count - 1].size *= axis.size;
  } else {
    axes[count++] = axis;
  }
}

Broadcast strides(const Array& array, const Dims& full, size_t axis) {
  Broadcast at;
  int64_t stride = 1;
  for (size_t k = full.size(); k-- > 0;) {
    const int64_t here = array.dims[k] == 1 ? 0 : stride;
    if (k == axis) {
      at.time_stride = here;
    } else if (k > axis) {
      append(at.inner, at.inner_axes, {full[k], here});
    } else {
      append(at.outer, at.outer_axes, {full[k], here});
    }
    stride *= array.dims[k];
  }
  return at;
}

Input input(const Array& array, const Dims& full, size_t axis) {
  if (array.absent()) return {};
  return {array.bytes.data(), array.dtype, strides(array, full, axis)};
}

template <class S>
S read(const Array& array, int64_t at) {
  return visit<S>(array.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    T x;
    std::memcpy(&x, array.bytes.data() + at * sizeof(T), sizeof(T));
    return load_as<S>(x);
  });
}

template <class S>
void write(Array& array, int64_t at, S value) {
  visit<S>(array.dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const T x = store_as<T>(value);
    std::memcpy(array.bytes.data() + at * sizeof(T), &x, sizeof(T));
  });
}

Array empty(const Dims& dims, DType dtype, int64_t bytes_each, bool aligned) {
  const size_t bytes = product(dims, 0, dims.size()) * bytes_each;
  return {dims, dtype, Bytes(bytes, aligned ? 0 : bytes_each)};
}

Array copy(const Array& array) {
  if (array.absent()) return {};
  Array other = array;
  other.bytes = Bytes(array.bytes.size, 0);
  std::memcpy(other.bytes.data(), array.bytes.data(), array.bytes.size);
  return other;
}

// The largest difference, relative to the largest value (`scale` or more); infinity where NaN or
// infinity stand in one array only.
template <class S>
double difference(const Array& got, const Array& want, double scale) {
  double worst = 0;
  const auto component = [&](double g, double w) {
    if (std::isnan(g) && std::isnan(w)) return;
    if (std::isinf(w) || std::isinf(g) || std::isnan(g) || std::isnan(w)) {
      if (g != w) worst = std::numeric_limits<double>::infinity();
      return;
    }
    worst = std::max(worst, std::fabs(g - w));
    scale = std::max(scale, std::fabs(w));
  };
  for (int64_t k = 0; k < want.size(); ++k) {
    const auto g = load_as<Complex128>(read<S>(got, k));
    const auto w = load_as<Complex128>(read<S>(want, k));
    component(g.re, w.re);
    component(g.im, w.im);
  }
  return worst == 0 ? 0 : worst / std::max(scale, 1e-30);
}

// Bit for bit, except that one NaN is as good as another.
bool same(const Array& x, const Array& y) {
  if (x.absent() || std::memcmp(x.bytes.data(), y.bytes.data(), x.bytes.size) == 0) return true;
  for (int64_t k = 0; k < x.size(); ++k) {
    const auto a = read<Complex128>(x, k), b = read<Complex128>(y, k);
    const auto component = [](double p, double q) {
      return (std::isnan(p) && std::isnan(q)) || std::memcmp(&p, &q, sizeof(p)) == 0;
    };
    if (!component(a.re, b.re) || !component(a.im, b.im)) return false;
  }
  return true;
}

struct Case {
  Problem problem;
  Dims full;
  size_t axis = 0;
  Array a, x, da, h, h0, init, reset;
  Array y, da_out, final;
  double sum_scale = 0;  // the largest sum of magnitudes behind an element of da_out

  std::string text() const {
    std::string text = "op " + std::to_string(static_cast<int>(problem.op)) + " state " +
                       name(problem.state) + " axis " + std::to_string(axis) +
                       (problem.reverse ? " reverse" : "") + (problem.has_h0 ? " h0" : "") +
                       (problem.da_over_time ? " da_over_time" : "") + " full";
    for (const int64_t n : full) text += " " + std::to_string(n);
    const auto add = [&](const char* label, const Array& array) {
      if (array.absent()) return;
      text += std::string(", ") + label + " " + name(array.dtype);
      for (const int64_t n : array.dims) text += " " + std::to_string(n);
    };
    add("a", a), add("x", x), add("da", da), add("h", h), add("h0", h0), add("init", init);
    add("reset", reset), add("y", y), add("da_out", da_out), add("final", final);
    return text;
  }
};

template <class S>
Case make_case(Random& random, DType state, bool large) {
  Case c;
  Problem& p = c.problem;
  p.op = static_cast<Op>(pick(random, 0, 2));
  p.state = state;
  p.reverse = chance(random, 0.5);
  p.has_h0 = chance(random, 0.5);

  int64_t rank = pick(random, 1, 5);
  c.axis = pick(random, 0, rank - 1);
  c.full.resize(rank);
  // Sizes around vector widths, now and then a long axis.
  for (int64_t& n : c.full) n = chance(random, 0.3) ? pick(random, 1, 2) : pick(random, 1, 9);
  c.full[c.axis] = chance(random, 0.2) ? pick(random, 1, 700) : pick(random, 1, 70);
  if (chance(random, 0.4)) {
    const int64_t longest = 60000 / product(c.full, 0, rank);
    if (longest > 1) c.full[pick(random, 0, rank - 1)] *= pick(random, 1, longest);
  }
  if (chance(random, 0.2)) {  // few channels and long: time is cut into blocks
    const int64_t inner =
        pick(random, 0, 3) == 0 ? 1 : pick(random, 1, chance(random, 0.3) ? 99 : 17);
    const int64_t outer = pick(random, 1, 3);
    c.full = {outer, pick(random, 200, std::max<int64_t>(300, 120000 / (inner * outer))), inner};
    c.axis = 1;
    rank = 3;
  }
  if (large) {  // larger than what the kernel takes to fit into caches
    const std::vector<Dims> shapes = {
        {3, 2100, 512}, {40, 4096, 21}, {530, 6000, 1}, {1, 70000, 48}};
    c.full = shapes[pick(random, 0, 3)];
    c.axis = 1;
    rank = 3;
  }
  const bool aligned = large || chance(random, 0.7);
  const double cuts = chance(random, 0.5) ? 0.1 : 0.002;
  p.time = c.full[c.axis];
  p.outer = product(c.full, 0, c.axis);
  p.inner = product(c.full, c.axis + 1, rank);

  const auto dtype = [&] {
    if (chance(random, 0.4)) return p.state;
    for (;;) {
      const DType t = static_cast<DType>(pick(random, 0, 5));
      if (readable(t, p.state)) return t;
    }
  };
  const auto make = [&](const Dims& dims, DType t) {
    return empty(dims, t, byte_size(t), aligned);
  };
  const bool spoiled = !large && chance(random, 0.1);
  const auto fill = [&](Array& array, double low, double high) {
    std::uniform_real_distribution<double> value(low, high);
    for (int64_t k = 0; k < array.size(); ++k) {
      Complex128 v(value(random), value(random));
      if (spoiled && chance(random, 0.01)) v.re = std::numeric_limits<double>::infinity();
      if (spoiled && chance(random, 0.01)) v.re = std::numeric_limits<double>::quiet_NaN();
      write<S>(array, k, store_as<S>(v));
    }
  };
  const double full_chance = large || chance(random, 0.4) ? 1.0 : 0.6;
  const auto broadcast_dims = [&](bool one_step) {
    Dims dims = c.full;
    for (int64_t& n : dims) n = chance(random, full_chance) ? n : 1;
    if (one_step) dims[c.axis] = 1;
    return dims;
  };
  const double growth = chance(random, 0.2) ? 1.3 : 1.0;
  const auto operand = [&](Array& array, double low, double high) {
    array = make(broadcast_dims(false), dtype());
    fill(array, low * growth, high * growth);
  };
  const auto state_like = [&](Array& array) {
    array = make(broadcast_dims(true), p.state);
    fill(array, -1, 1);
  };
  Dims one = c.full;
  one[c.axis] = 1;

  operand(c.a, -0.8, 0.8);
  const bool scan = p.op == Op::kScan, tangent = p.op == Op::kTangent,
             cotangent = p.op == Op::kCotangent;
  if (scan || chance(random, 0.8)) operand(c.x, -1, 1);
  if (scan ? p.has_h0 : cotangent ? chance(random, 0.7) : p.has_h0 && chance(random, 0.7)) {
    state_like(c.init);
  }
  if (tangent && chance(random, 0.8)) operand(c.da, -1, 1);
  if (chance(random, 0.4)) {
    c.reset = empty(broadcast_dims(false), DType::kF32, 1, aligned);
    for (size_t k = 0; k < c.reset.bytes.size; ++k) c.reset.bytes.data()[k] = chance(random, cuts);
  }
  if (cotangent && chance(random, 0.8)) {
    p.da_over_time = p.time > 1 && chance(random, 0.4);
    c.da_out = make(p.da_over_time ? one : c.full, dtype());
  }
  if (!c.da.absent() || !c.da_out.absent()) {
    operand(c.h, -1, 1);
    if (p.has_h0) state_like(c.h0);
  }
  if (!cotangent || chance(random, 0.8)) c.y = make(c.full, dtype());
  if (cotangent ? p.has_h0 && chance(random, 0.8) : chance(random, 0.6)) {
    c.final = make(one, p.state);
  }

  p.a = input(c.a, c.full, c.axis);
  p.x = input(c.x, c.full, c.axis);
  p.da = input(c.da, c.full, c.axis);
  p.h = input(c.h, c.full, c.axis);
  p.h0 = input(c.h0, c.full, c.axis);
  p.init = input(c.init, c.full, c.axis);
  p.reset = input(c.reset, c.full, c.axis);
  const auto output = [](Array& array) {
    return Output{array.absent() ? nullptr : array.bytes.data(), array.dtype};
  };
  p.y = output(c.y);
  p.da_out = output(c.da_out);
  p.final = output(c.final);
  return c;
}

// The recurrence as problem.h states it, one channel at a time. Results go to c's arrays.
template <class S>
void reference(Case& c) {
  const Problem& p = c.problem;
  const auto at = [&](const Array& array, int64_t o, int64_t t, int64_t i) {
    return array.absent() ? S(0) : read<S>(array, locate(array, c.full, c.axis, o, t, i));
  };
  for (int64_t o = 0; o < p.outer; ++o) {
    for (int64_t i = 0; i < p.inner; ++i) {
      S s = at(c.init, o, 0, i);
      Complex128 sum;
      double magnitudes = 0;
      for (int64_t k = 0; k < p.time; ++k) {
        const int64_t t = p.descending() ? p.time - 1 - k : k;
        const int64_t before = p.reverse ? t + 1 : t - 1;
        const bool first = before < 0 || before >= p.time;
        const S h_prev = first ? at(c.h0, o, 0, i) : at(c.h, o, before, i);
        const bool cut = (first && !p.has_h0) ||
                         (!c.reset.absent() &&
                          c.reset.bytes.data()[locate(c.reset, c.full, c.axis, o, t, i)] != 0);
        const S a = at(c.a, o, t, i), x = at(c.x, o, t, i);
        const auto put = [&](Array& array, S value) {
          if (!array.absent()) write<S>(array, (o * p.time + t) * p.inner + i, value);
        };
        if (p.op == Op::kCotangent) {
          const S u = x + s;
          const S d = cut ? S(0) : u * h_prev;
          put(c.y, u);
          if (p.da_over_time) {
            sum = sum + load_as<Complex128>(d);
            magnitudes += static_cast<double>(magnitude(d));
          } else {
            put(c.da_out, d);
          }
          s = cut ? S(0) : a * u;
        } else {
          const S input = c.da.absent() ? x : mul_add(at(c.da, o, t, i), h_prev, x);
          s = cut ? x : mul_add(a, s, input);
          put(c.y, s);
        }
      }
      if (magnitudes > c.sum_scale) c.sum_scale = magnitudes;
      if (p.da_over_time) write<S>(c.da_out, o * p.inner + i, store_as<S>(sum));
      if (!c.final.absent()) write<S>(c.final, o * p.inner + i, s);
    }
  }
}

void run(const Problem& p, int64_t threads, cpu::InstructionSet set) {
  const cpu::Tiling tiling(p, threads);
  std::vector<std::thread> started;
  cpu::parallel_for(
      tiling.count(), threads - 1, [&](auto task) { started.emplace_back(std::move(task)); },
      [&](int64_t index) {
        if (!cpu::run_tile(p, tiling.blocks(), tiling.tile(index), set)) std::abort();
      });
  for (std::thread& thread : started) thread.join();
}

template <class S>
bool check(Random& random, DType state, bool large) {
  Case c = make_case<S>(random, state, large);
  run(c.problem, 1, cpu::best_instruction_set());
  const Array y = copy(c.y), da_out = copy(c.da_out), final = copy(c.final);
  bool ok = true;
  const auto fail = [&](const char* what, double by) {
    std::printf("%s differs by %g: %s\n", what, by, c.text().c_str());
    ok = false;
  };
  const auto run_again = [&](int64_t threads, cpu::InstructionSet set) {
    run(c.problem, threads, set);
    if (!same(y, c.y) || !same(da_out, c.da_out) || !same(final, c.final)) {
      fail(("instruction set " + std::to_string(static_cast<int>(set)) + ", " +
            std::to_string(threads) + " threads")
               .c_str(),
           0);
    }
  };
  for (const auto set :
       {cpu::InstructionSet::kBaseline, cpu::InstructionSet::kAvx2, cpu::InstructionSet::kAvx512}) {
    if (cpu::supported(set)) run_again(pick(random, 0, 1) == 0 ? pick(random, 1, 3) : 8, set);
  }
  reference<S>(c);
  const auto compare = [&](const char* what, const Array& got, const Array& want, double limit) {
    if (want.absent()) return;
    const double by = difference<S>(got, want, c.sum_scale);
    if (!(by <= limit)) fail(what, by);
  };
  const auto unit = [](DType t) {
    return t == DType::kBF16                                   ? 0x1p-7
           : t == DType::kF16                                  ? 0x1p-9
           : sizeof(Real<S>) == sizeof(float) || !is_double(t) ? 1e-4
                                                               : 1e-11;
  };
  const bool cut = cpu::Blocks(c.problem).cut();
  compare("y", y, c.y, cut ? unit(c.y.dtype) : 0);
  compare("final", final, c.final, cut ? unit(c.final.dtype) : 0);
  compare("da_out", da_out, c.da_out, cut || c.problem.da_over_time ? unit(c.da_out.dtype) : 0);
  return ok;
}

}  // namespace
}  // namespace jax_scan

int main(int argc, char** argv) {
  using namespace jax_scan;
  const int problems = argc > 1 ? std::atoi(argv[1]) : 2000;
  const uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
  int failed = 0;
  for (int k = 0; k < problems; ++k) {
    Random random(seed + k);
    const bool large = k % 500 >= 496;
    bool ok = true;
    switch (k % 4) {
      case 0:
        ok = check<float>(random, DType::kF32, large);
        break;
      case 1:
        ok = check<double>(random, DType::kF64, large);
        break;
      case 2:
        ok = check<Complex64>(random, DType::kC64, large);
        break;
      case 3:
        ok = check<Complex128>(random, DType::kC128, large);
        break;
    }
    if (!ok && ++failed >= 20) break;
  }
  std::printf("%d of %d problems failed (seed %llu)\n", failed, problems,
              static_cast<unsigned long long>(seed));
  return failed ? 1 : 0;
}
