#include "core/operands.h"

#include <optional>
#include <span>
#include <string>
#include <vector>

namespace jax_scan {
namespace {

namespace ffi = xla::ffi;

// How an operand's or result's shape follows from the full shape.
enum class Extent {
  kFull,     // every axis; an operand may have 1 instead
  kOneStep,  // 1 in time
  kSummed,   // every axis, but it may have 1 in time, in the last axes or in the last before time
};

struct OperandSpec {
  std::string_view name;
  Input Problem::* slot;
  Extent extent = Extent::kFull;
  bool required = false;
};

struct ResultSpec {
  std::string_view name;
  Output Problem::* slot;
  Extent extent = Extent::kFull;
};

struct OpSpec {
  std::string_view target;
  std::span<const OperandSpec> operands;
  std::span<const ResultSpec> results;
};

constexpr OperandSpec kScanOperands[] = {
    {"a", &Problem::a, Extent::kFull, true},
    {"b", &Problem::x, Extent::kFull, true},
    {"h0", &Problem::init, Extent::kOneStep},
    {"reset", &Problem::reset},
};
constexpr ResultSpec kScanResults[] = {
    {"h", &Problem::y},
    {"state", &Problem::final, Extent::kOneStep},
};
constexpr OperandSpec kTangentOperands[] = {
    {"a", &Problem::a, Extent::kFull, true},
    {"h", &Problem::h},
    {"h0", &Problem::h0, Extent::kOneStep},
    {"reset", &Problem::reset},
    {"da", &Problem::da},
    {"db", &Problem::x},
    {"dh0", &Problem::init, Extent::kOneStep},
};
constexpr ResultSpec kTangentResults[] = {
    {"dh", &Problem::y},
    {"dstate", &Problem::final, Extent::kOneStep},
};
constexpr OperandSpec kCotangentOperands[] = {
    {"a", &Problem::a, Extent::kFull, true},
    {"h", &Problem::h},
    {"h0", &Problem::h0, Extent::kOneStep},
    {"reset", &Problem::reset},
    {"g", &Problem::x},
    {"gstate", &Problem::init, Extent::kOneStep},
};
constexpr ResultSpec kCotangentResults[] = {
    {"da", &Problem::da_out, Extent::kSummed},
    {"db", &Problem::y},
    {"dh0", &Problem::final, Extent::kOneStep},
};

OpSpec spec_of(Op op) {
  switch (op) {
    case Op::kTangent:
      return {"jax_scan.v1.tangent", kTangentOperands, kTangentResults};
    case Op::kCotangent:
      return {"jax_scan.v1.cotangent", kCotangentOperands, kCotangentResults};
    case Op::kScan:
      break;
  }
  return {"jax_scan.v1.scan", kScanOperands, kScanResults};
}

template <class Spec>
const Spec* find(std::span<const Spec> specs, std::string_view name) {
  for (const Spec& spec : specs) {
    if (spec.name == name) return &spec;
  }
  return nullptr;
}

// Takes the first one off names that are separated by blanks.
std::string_view take_name(std::string_view& names) {
  const size_t space = names.find(' ');
  const std::string_view first = names.substr(0, space);
  names = space == std::string_view::npos ? "" : names.substr(space + 1);
  return first;
}
size_t count(std::string_view names) {
  size_t n = 0;
  for (; !names.empty(); ++n) take_name(names);
  return n;
}

// For messages: also of dtypes that no operand may have.
std::string name_of(const ffi::AnyBuffer& buffer) {
  const ffi::DataType type = buffer.element_type();
  if (const std::optional<DType> dtype = dtype_of(type)) return name(*dtype);
  switch (type) {
    case ffi::PRED:
      return "bool";
    case ffi::S8:
      return "int8";
    case ffi::S16:
      return "int16";
    case ffi::S32:
      return "int32";
    case ffi::S64:
      return "int64";
    case ffi::U8:
      return "uint8";
    case ffi::U16:
      return "uint16";
    case ffi::U32:
      return "uint32";
    case ffi::U64:
      return "uint64";
    default:
      return "number " + std::to_string(static_cast<int>(type)) + " of XLA's";
  }
}

// A buffer's shape with its axes as they lie in memory.
class Dims {
 public:
  Dims(const ffi::AnyBuffer& buffer, const Attributes& attributes)
      : given_(buffer.dimensions()), axis_(static_cast<size_t>(attributes.axis)) {
    if (!attributes.time_last) axis_ = size();
  }
  size_t size() const { return given_.size(); }
  int64_t operator[](size_t k) const {
    if (k < axis_) return given_[k];
    return given_[k == axis_ ? size() - 1 : k - 1];
  }

 private:
  ffi::AnyBuffer::Dimensions given_;
  size_t axis_;  // where the last axis that is given belongs, or beyond all
};

bool equal(const Dims& dims, std::span<const int64_t> others) {
  bool same = dims.size() == others.size();
  for (size_t k = 0; same && k < others.size(); ++k) same = dims[k] == others[k];
  return same;
}

template <class Shape>
std::string to_string(const Shape& dims) {
  std::string text = "(";
  for (size_t k = 0; k < dims.size(); ++k) {
    text += (k ? ", " : "") + std::to_string(dims[k]);
  }
  return text + ")";
}

bool has_bit(int64_t set, size_t k) { return k < 63 && (set >> k) & 1; }

// Appends an axis, minor first, merged into its neighbour where one stride serves both. False when
// there is no room.
bool append(Broadcast::Axis* axes, int32_t& count, Broadcast::Axis axis) {
  if (axis.size == 1) return true;
  if (count > 0) {
    Broadcast::Axis& last = axes[count - 1];
    if (axis.stride == last.stride * last.size) {
      last.size *= axis.size;
      return true;
    }
  }
  if (count == kMaxAxes) return false;
  axes[count++] = axis;
  return true;
}

// See operands.h.
template <class Shape>
bool place(const Shape& dims, int64_t repeated, std::span<const int64_t> full, int64_t axis,
           Broadcast& at) {
  int64_t stride = 1;
  for (int64_t k = static_cast<int64_t>(full.size()) - 1; k >= 0; --k) {
    const int64_t here = dims[k] == 1 || has_bit(repeated, k) ? 0 : stride;
    if (k == axis) {
      at.time_stride = here;
    } else if (k > axis) {
      if (!append(at.inner, at.inner_axes, {full[k], here})) return false;
    } else {
      if (!append(at.outer, at.outer_axes, {full[k], here})) return false;
    }
    stride *= dims[k];
  }
  return true;
}

// Of axes [begin, end) those at the end in which a result has size 1 are summed over: how many
// neighbouring indices that joins. Takes them out of the shape that is expected.
int64_t summed_run(const Dims& dims, int64_t begin, int64_t end, std::vector<int64_t>& expected) {
  int64_t run = 1;
  for (int64_t k = end - 1; k >= begin && dims[k] == 1; --k) {
    run *= expected[k];
    expected[k] = 1;
  }
  return run;
}

// Builds the error values of one call; every message starts with the target's name.
class Checker {
 public:
  explicit Checker(std::string_view target) : target_(target) {}

  ffi::Error error(std::string_view message) const {
    return ffi::Error::InvalidArgument(std::string(target_) + ": " + std::string(message));
  }
  ffi::Error error(std::string_view kind, std::string_view name, std::string_view message) const {
    return error(std::string(kind) + " '" + std::string(name) + "' " + std::string(message));
  }

 private:
  std::string_view target_;
};

}  // namespace

std::optional<DType> state_dtype_of(std::string_view text) {
  for (DType t : {DType::kF32, DType::kF64, DType::kC64, DType::kC128}) {
    if (text == name(t)) return t;
  }
  return std::nullopt;
}

std::optional<DType> dtype_of(ffi::DataType t) {
  switch (t) {
    case ffi::F16:
      return DType::kF16;
    case ffi::BF16:
      return DType::kBF16;
    case ffi::F32:
      return DType::kF32;
    case ffi::F64:
      return DType::kF64;
    case ffi::C64:
      return DType::kC64;
    case ffi::C128:
      return DType::kC128;
    default:
      return std::nullopt;
  }
}

bool broadcast(std::span<const int64_t> dims, int64_t repeated, std::span<const int64_t> full,
               int64_t axis, Broadcast& at) {
  return place(dims, repeated, full, axis, at);
}

ffi::Error decode(Op op, ffi::RemainingArgs args, ffi::RemainingRets rets,
                  const Attributes& attributes, bool (*sums_da)(const Problem&), Call& call) {
  const OpSpec spec = spec_of(op);
  const Checker check(spec.target);

  if (const size_t names = count(attributes.operands); names != args.size()) {
    return check.error("attribute 'operands' names " + std::to_string(names) +
                       " operands, the call has " + std::to_string(args.size()));
  }
  if (const size_t names = count(attributes.results); names != rets.size()) {
    return check.error("attribute 'results' names " + std::to_string(names) +
                       " results, the call has " + std::to_string(rets.size()));
  }
  const std::optional<DType> state = state_dtype_of(attributes.state);
  if (!state) {
    return check.error(
        "attribute 'state' must be float32, float64, complex64 or complex128, got '" +
        std::string(attributes.state) + "'");
  }

  if (attributes.repeated.size() != args.size()) {
    return check.error("attribute 'repeated' has " + std::to_string(attributes.repeated.size()) +
                       " entries, the call has " + std::to_string(args.size()) + " operands");
  }
  if (attributes.axis < 0 || attributes.length < 0) {
    return check.error("attributes 'axis' and 'length' must not be negative, got " +
                       std::to_string(attributes.axis) + " and " +
                       std::to_string(attributes.length));
  }

  Problem& p = call.problem;
  p.op = op;
  p.state = *state;
  p.time = attributes.length;
  p.reverse = attributes.reverse;
  p.has_h0 = attributes.has_h0;

  // The full shape: in each axis the largest size that any operand or result has, repeated entries
  // counted once.
  std::vector<int64_t> full;
  const auto merge = [&](std::string_view kind, std::string_view name, const Dims& dims,
                         int64_t repeated) -> ffi::Error {
    if (full.empty()) full.assign(dims.size(), 1);
    if (dims.size() != full.size() || attributes.axis >= static_cast<int64_t>(full.size())) {
      return check.error(kind, name,
                         "has shape " + to_string(dims) + ", expected rank " +
                             std::to_string(full.size()) + " with time axis " +
                             std::to_string(attributes.axis));
    }
    full[attributes.axis] = attributes.length;
    if (has_bit(repeated, attributes.axis)) {
      return check.error(kind, name, "can't be repeated in time");
    }
    for (size_t k = 0; k < full.size(); ++k) {
      if (has_bit(repeated, k) && dims[k] == 0) {
        return check.error(kind, name, "is repeated in axis " + std::to_string(k) + " of size 0");
      }
      if (dims[k] == 1 || dims[k] == full[k] || has_bit(repeated, k)) continue;
      if (full[k] != 1 || static_cast<int64_t>(k) == attributes.axis) {
        return check.error(
            kind, name,
            "has shape " + to_string(dims) + ", which does not broadcast to " + to_string(full));
      }
      full[k] = dims[k];
    }
    return ffi::Error::Success();
  };

  std::string_view names = attributes.operands;
  for (size_t j = 0; j < args.size(); ++j) {
    const std::string_view given = take_name(names);
    const OperandSpec* operand = find(spec.operands, given);
    if (!operand) return check.error("operand", given, "is not one of this target's");
    ffi::ErrorOr<ffi::AnyBuffer> buffer = args.get<ffi::AnyBuffer>(j);
    if (!buffer.has_value()) return buffer.error();
    Input& input = p.*(operand->slot);
    if (input.data) return check.error("operand", operand->name, "is given twice");
    const Dims dims(*buffer, attributes);
    ffi::Error merged = merge("operand", operand->name, dims, attributes.repeated[j]);
    if (merged.failure()) return merged;
    input.data = buffer->untyped_data();
    if (!input.data && buffer->element_count() > 0) {
      return check.error("operand", operand->name, "has no data");
    }
    if (operand->slot == &Problem::reset) {
      if (buffer->element_type() != ffi::PRED) {
        return check.error("operand", operand->name, "must be bool, got " + name_of(*buffer));
      }
      continue;
    }
    const std::optional<DType> dtype = dtype_of(buffer->element_type());
    if (!dtype || !readable(*dtype, p.state)) {
      return check.error("operand", operand->name,
                         "has dtype " + name_of(*buffer) + ", which a " +
                             std::string(name(p.state)) + " state can't read");
    }
    input.dtype = *dtype;
    if (operand->extent == Extent::kOneStep && (*dtype != p.state || dims[attributes.axis] != 1)) {
      return check.error("operand", operand->name,
                         "must have dtype " + std::string(name(p.state)) +
                             " and size 1 in time, got " + name(*dtype) + " and shape " +
                             to_string(dims));
    }
  }
  for (const OperandSpec& operand : spec.operands) {
    if (operand.required && !(p.*(operand.slot)).data) {
      return check.error("operand", operand.name, "is missing");
    }
  }

  names = attributes.results;
  for (size_t j = 0; j < rets.size(); ++j) {
    const std::string_view given = take_name(names);
    ffi::ErrorOr<ffi::Result<ffi::AnyBuffer>> buffer = rets.get<ffi::AnyBuffer>(j);
    if (!buffer.has_value()) return buffer.error();
    if (given == "workspace") {
      call.workspace = {(*buffer)->untyped_data(), (*buffer)->size_bytes()};
      continue;
    }
    const ResultSpec* result = find(spec.results, given);
    if (!result) return check.error("result", given, "is not one of this target's");
    const Dims dims(**buffer, attributes);
    ffi::Error merged = merge("result", result->name, dims, /*repeated=*/0);
    if (merged.failure()) return merged;
  }

  // Now that the full shape is known: the operands' strides and the results' extents.
  p.outer = p.inner = 1;
  for (size_t k = 0; k < full.size(); ++k) {
    if (static_cast<int64_t>(k) < attributes.axis) p.outer *= full[k];
    if (static_cast<int64_t>(k) > attributes.axis) p.inner *= full[k];
  }
  names = attributes.operands;
  for (size_t j = 0; j < args.size(); ++j) {
    const OperandSpec* operand = find(spec.operands, take_name(names));
    const ffi::AnyBuffer buffer = *args.get<ffi::AnyBuffer>(j);
    Input& input = p.*(operand->slot);
    if (!place(Dims(buffer, attributes), attributes.repeated[j], full, attributes.axis, input.at)) {
      return check.error("operand", operand->name,
                         "alternates between broadcast and full axes more than " +
                             std::to_string(kMaxAxes) + " times on one side of time");
    }
  }
  names = attributes.results;
  std::vector<int64_t> expected;
  for (size_t j = 0; j < rets.size(); ++j) {
    const ResultSpec* result = find(spec.results, take_name(names));
    if (!result) continue;
    const ffi::AnyBuffer buffer = **rets.get<ffi::AnyBuffer>(j);
    Output& output = p.*(result->slot);
    if (output.data) return check.error("result", result->name, "is given twice");
    output.data = buffer.untyped_data();
    const std::optional<DType> dtype = dtype_of(buffer.element_type());
    const bool one_step = result->extent == Extent::kOneStep;
    if (!dtype || !readable(*dtype, p.state) || (one_step && *dtype != p.state)) {
      return check.error("result", result->name,
                         "has dtype " + name_of(buffer) + ", in which a " +
                             std::string(name(p.state)) + " state can't be stored");
    }
    output.dtype = *dtype;
    expected = full;
    const Dims dims(buffer, attributes);
    const bool summed = result->extent == Extent::kSummed;
    const bool over_time = summed && p.time > 1 && dims[attributes.axis] == 1;
    if (one_step || over_time) expected[attributes.axis] = 1;
    if (summed && !over_time) {
      p.da_inner_run = summed_run(dims, attributes.axis + 1, full.size(), expected);
      if (p.da_inner_run == 1) p.da_outer_run = summed_run(dims, 0, attributes.axis, expected);
    }
    if (!equal(dims, expected)) {
      return check.error("result", result->name,
                         "has shape " + to_string(dims) + ", expected " + to_string(expected));
    }
    if (summed) p.da_over_time = over_time;
  }

  // What one operand or result asks of the others.
  if (op == Op::kScan && p.has_h0 && !p.init.data) {
    return check.error("operand", "h0", "is missing, but attribute 'has_h0' is true");
  }
  if (op != Op::kCotangent && !p.has_h0 && p.init.data) {
    return check.error("operand", op == Op::kScan ? "h0" : "dh0",
                       "is given, but attribute 'has_h0' is false");
  }
  if (op == Op::kScan && !p.y.data && !p.final.data) {
    return check.error("neither 'h' nor 'state' is among the results");
  }
  if (op == Op::kTangent && !p.y.data) return check.error("result", "dh", "is missing");
  const bool needs_h = op == Op::kTangent ? p.da.data != nullptr : p.da_out.data != nullptr;
  if (needs_h && (!p.h.data || (p.has_h0 && !p.h0.data))) {
    return check.error("operands 'h' and, where the scan has one, 'h0' are needed with 'da'");
  }
  if (p.da_over_runs() && !sums_da(p)) {
    return check.error("result", "da", "is a sum over other axes than a kernel here sums over");
  }
  if (op == Op::kCotangent && p.final.data && !p.has_h0) {
    return check.error("result", "dh0", "is asked of a scan without h0");
  }
  return ffi::Error::Success();
}

}  // namespace jax_scan
