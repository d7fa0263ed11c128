// Bulk copies to shared memory by the tensor memory accelerator, and the barriers that tell of
// them.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "core/problem.h"

namespace jax_scan {

// They exist from compute capability 9.0 on; before it kernels that need them are empty, and not
// launched.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
inline constexpr bool kHasBulkCopies = false;
#else
inline constexpr bool kHasBulkCopies = true;
#endif

__device__ __forceinline__ uint32_t shared_address(const void* place) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(place));
}

// An mbarrier in shared memory, which is passed again and again. `parity`: of the number of earlier
// passes.
class Barrier {
 public:
  __device__ void init(int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at()), "r"(arrivals) : "memory");
  }
  __device__ void arrive() {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at()) : "memory");
  }
  // Arrives, and has the barrier wait for so many bytes of copies, too.
  __device__ void arrive_and_expect(uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at()), "r"(bytes)
                 : "memory");
  }
  __device__ void wait(uint32_t parity) const {
    asm volatile(
        "{ .reg .pred done;\n\t"
        "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t"
        "@!done bra again; }" ::"r"(at()),
        "r"(parity)
        : "memory");
  }
  __device__ uint32_t at() const { return shared_address(&word_); }

 private:
  uint64_t word_;
};

// Whoever has set barriers up says so before others use them.
__device__ __forceinline__ void barriers_are_ready() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// What this thread has written to shared memory comes before the bulk copies of whoever is told of
// it.
__device__ __forceinline__ void before_bulk_copies() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Source, place and size in multiples of 16 bytes.
__device__ __forceinline__ void copy_run(void* to, const void* from, uint32_t bytes,
                                         const Barrier& arrival) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(arrival.at())
      : "memory");
}
// What lies outside of the tensor becomes zero.
__device__ __forceinline__ void copy_box(void* to, const CUtensorMap* from, int i, int time, int o,
                                         const Barrier& arrival) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, "
      "{%2, %3, %4}], [%5];" ::"r"(shared_address(to)),
      "l"(from), "r"(i), "r"(time), "r"(o), "r"(arrival.at())
      : "memory");
}

// An operand (outer, time, inner) of T as a tensor, of which boxes of steps x width are copied.
// Rows must lie in 16-byte pieces.
template <class T>
cudaError_t boxes_of(const Problem& p, const Input& in, int64_t width, int64_t steps,
                     CUtensorMap& out,
                     CUtensorMapL2promotion promotion = CU_TENSOR_MAP_L2_PROMOTION_NONE) {
  // The driver's function, without linking to the driver.
  static const auto encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result{};
#if CUDART_VERSION >= 12050
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found,
                                                               12000, cudaEnableDefault, &result);
#else
    const cudaError_t error =
        cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &result);
#endif
    const bool there = error == cudaSuccess && result == cudaDriverEntryPointSuccess;
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(there ? found : nullptr);
  }();
  if (!encode) return cudaErrorNotSupported;
  // Of the type only the size counts.
  constexpr CUtensorMapDataType kType = sizeof(T) == 8   ? CU_TENSOR_MAP_DATA_TYPE_FLOAT64
                                        : sizeof(T) == 4 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                                                         : CU_TENSOR_MAP_DATA_TYPE_UINT16;
  const auto inner = static_cast<cuuint64_t>(p.inner), time = static_cast<cuuint64_t>(p.time);
  const cuuint64_t sizes[] = {inner, time, static_cast<cuuint64_t>(p.outer)};
  const cuuint64_t strides[] = {sizeof(T) * inner, sizeof(T) * inner * time};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(width), static_cast<cuuint32_t>(steps), 1};
  const cuuint32_t ones[] = {1, 1, 1};
  const CUresult result = encode(&out, kType, 3, const_cast<void*>(in.data), sizes, strides, box,
                                 ones, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
                                 promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorNotSupported;
}

}  // namespace jax_scan
