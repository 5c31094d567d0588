// FlashInfer's TrtllmGenBatchedGemmRunner for a GPU that is not a Blackwell: plain loops in its place, linked instead of it.
// Weights and their scales are taken as [expert, column, k], unshuffled; rows and activations' scales as the real one has
// them. Like the real one it has nothing for a GEMM that FlashInfer ships no kernel for. And FlashInfer's own activation and
// sum, which run on such a GPU, to compare ours with.

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include "flashinfer/exception.h"
#include "flashinfer/trtllm/batched_gemm/KernelRunner.h"
#include "flashinfer/trtllm/batched_gemm/trtllmGen_bmm_export/BatchedGemmInterface.h"
#include "flashinfer/trtllm/fused_moe/DevKernel.h"
#include "tvm_ffi_utils.h"

namespace tensorrt_llm::kernels {
namespace {

using batchedGemm::batchedGemm::BatchedGemmInterface;
namespace dtypes = batchedGemm::trtllm::gen;

constexpr int kColumns = 128;  // of a block: those that share an FP8 scale

struct Problem {
  void const *x, *x_scales, *weights, *weight_scales;
  float const* alphas;
  void *out, *out_scales;
  int const *token_of_row, *in_use, *tile_experts, *tile_ends, *tiles;
  int tokens, n, k, tile;
  bool fp4;
};

__device__ float e2m1(int code) {
  float const sizes[8] = {0.f, .5f, 1.f, 1.5f, 2.f, 3.f, 4.f, 6.f};
  return code & 8 ? -sizes[code & 7] : sizes[code & 7];
}

__device__ float e4m3(void const* values, int64_t at) {
  return float(static_cast<__nv_fp8_e4m3 const*>(values)[at]);
}

__device__ float fp4(void const* codes, int64_t at) {
  int byte = static_cast<uint8_t const*>(codes)[at / 2];
  return e2m1(at % 2 ? byte >> 4 : byte & 15);
}

// Where an activation's NVFP4 scale lies: blocks of 4 groups, by 128 rows in fours of every 32nd, or by 8 rows.
__device__ int64_t scale_at(int64_t row, int group, int groups, int tile) {
  if (tile < 128) return (row / 8 * (groups / 4) + group / 4) * 32 + row % 8 * 4 + group % 4;
  return (row / 128 * (groups / 4) + group / 4) * 512 + row % 32 * 16 + row % 128 / 32 * 4 + group % 4;
}

// One row and kColumns columns a block, one column a thread.
__global__ void multiply(Problem p) {
  int64_t row = blockIdx.x;
  int tile = row / p.tile, column = blockIdx.y * kColumns + threadIdx.x;
  if (tile >= *p.tiles || row >= p.tile_ends[tile]) return;
  int64_t expert = p.tile_experts[tile], from = p.token_of_row ? p.token_of_row[row] : row;
  int64_t stride = p.token_of_row ? p.tokens : *p.in_use;
  float sum = 0;
  for (int k = 0; k < p.k && column < p.n; k++) {
    int64_t line = expert * p.n + column;
    if (p.fp4) {
      float x = fp4(p.x, from * p.k + k) * e4m3(p.x_scales, scale_at(from, k / 16, p.k / 16, p.tile));
      sum += x * fp4(p.weights, line * p.k + k) * e4m3(p.weight_scales, line * (p.k / 16) + k / 16);
    } else {
      float x = e4m3(p.x, from * p.k + k) * static_cast<float const*>(p.x_scales)[k / 128 * stride + from];
      int64_t block = (expert * (p.n / 128) + column / 128) * (p.k / 128) + k / 128;
      sum += x * e4m3(p.weights, line * p.k + k) * static_cast<float const*>(p.weight_scales)[block];
    }
  }
  if (p.alphas) sum *= p.alphas[expert];
  if (!p.out_scales) {
    if (column < p.n) static_cast<__nv_bfloat16*>(p.out)[row * p.n + column] = __float2bfloat16(sum);
    return;
  }
  __shared__ float largest[kColumns];
  largest[threadIdx.x] = fabsf(sum);
  for (int step = kColumns / 2; step; step /= 2) {
    __syncthreads();
    if (threadIdx.x < step) largest[threadIdx.x] = fmaxf(largest[threadIdx.x], largest[threadIdx.x + step]);
  }
  __syncthreads();
  float scale = fmaxf(largest[0] / 448.f, 1e-30f);
  static_cast<__nv_fp8_e4m3*>(p.out)[row * p.n + column] = __nv_fp8_e4m3(sum / scale);
  if (!threadIdx.x) static_cast<float*>(p.out_scales)[int64_t(blockIdx.y) * *p.in_use + row] = scale;
}

}  // namespace

TrtllmGenBatchedGemmRunner::TrtllmGenBatchedGemmRunner(TrtllmGenBatchedGemmRunnerOptions const& wanted)
    : mOptions(wanted) {
  auto const interface = BatchedGemmInterface();
  for (size_t i = 0; i < interface.getNumBatchedGemmConfigs(); i++) {
    auto const& has = interface.getBatchedGemmConfigs()[i].mOptions;
    bool types = has.mDtypeA == wanted.dtypeA && has.mDtypeB == wanted.dtypeB && has.mDtypeC == wanted.dtypeC;
    bool routed = !doesRouteImplUseNoRoute(has.mRouteImpl);
    bool form = has.mTransposeMmaOutput && has.mTileN == wanted.tileSize && has.mEpilogueTileM == wanted.epilogueTileM &&
                has.mUseShuffledMatrix == wanted.useShuffledMatrix && has.mLayoutA == wanted.weightLayout;
    bool work = has.mUseDeepSeekFp8 == wanted.deepSeekFp8 && routed == wanted.routeAct && !has.mIsStaticBatch &&
                has.mFusedAct == wanted.fusedAct && int64_t(has.mEltwiseActType) == int64_t(wanted.eltwiseActType);
    if (types && form && work && has.mClusterDimZ == 1) mPassingConfigIndices.push_back(i);
  }
  FLASHINFER_CHECK(!mPassingConfigIndices.empty(), "No kernel found for the given options");
}

size_t TrtllmGenBatchedGemmRunner::getWorkspaceSizeInBytes(int32_t, int32_t, int32_t, std::vector<int32_t> const&, int32_t,
                                                           int32_t, int32_t, int32_t) const {
  return 16;
}

int64_t TrtllmGenBatchedGemmRunner::getDefaultValidConfigIndex(int32_t, int32_t n, int32_t k, std::vector<int32_t> const&,
                                                               int32_t, int32_t, int32_t) const {
  FLASHINFER_CHECK(n % 64 == 0 && k % 64 == 0, "No valid config for ", n, " x ", k);
  return mPassingConfigIndices[0];
}

bool TrtllmGenBatchedGemmRunner::isValidConfigIndex(int32_t, int32_t, int32_t n, int32_t k, std::vector<int32_t> const&,
                                                    int32_t, int32_t, int32_t) const {
  return n % 64 == 0 && k % 64 == 0;
}

void TrtllmGenBatchedGemmRunner::run(
    int32_t, int32_t n, int32_t k, std::vector<int32_t> const&, int32_t tokens, int32_t, int32_t most_tiles, void const* x,
    void const* x_scales, void const* weights, void const* weight_scales, void const*, void const*, float const* alphas,
    float const*, float const*, float const*, float const*, float const*, void* out, void* out_scales,
    int32_t const* token_of_row, int32_t const* in_use, int32_t const* tile_experts, int32_t const* tile_ends,
    int32_t const* tiles, void*, CUstream stream, int, int32_t config, bool) {
  auto const& options = BatchedGemmInterface().getBatchedGemmConfigs()[config].mOptions;
  FLASHINFER_CHECK(options.mTileN == mOptions.tileSize, "not a configuration of this runner");
  Problem problem{x, x_scales, weights, weight_scales, alphas, out, out_scales, token_of_row, in_use, tile_experts,
                  tile_ends, tiles, tokens, n, k, mOptions.tileSize, mOptions.dtypeA == dtypes::Dtype::E2m1};
  dim3 grid(most_tiles * mOptions.tileSize, (n + kColumns - 1) / kColumns);
  multiply<<<grid, kColumns, 0, (cudaStream_t)stream>>>(problem);
}

}  // namespace tensorrt_llm::kernels

namespace lora_fastpath_reference {

namespace dtypes = batchedGemm::trtllm::gen;

// FlashInfer's, of FP8 blocks: gate_up e4m3 [rows, 2I] and its scales into out e4m3 [rows, I] and its scales.
void activate(TensorView gate_up, TensorView scales, TensorView permuted, TensorView in_use, TensorView out,
              TensorView out_scales) {
  moe::dev::activation::Data data{};
  data.mDtypeElt = dtypes::Dtype::E4m3;
  data.mUseDeepSeekFp8 = true;
  data.inPtr = gate_up.data_ptr();
  data.outPtr = out.data_ptr();
  data.inDqSfsPtr = static_cast<float*>(scales.data_ptr());
  data.outDqSfsPtr = static_cast<float*>(out_scales.data_ptr());
  data.innerDim = gate_up.size(1);
  data.numTokens = permuted.size(0);
  data.topK = permuted.size(1);
  data.expandedIdxToPermutedIdx = static_cast<int*>(permuted.data_ptr());
  data.totalNumPaddedTokens = static_cast<int*>(in_use.data_ptr());
  moe::dev::activation::run(data, get_stream(gate_up.device()));
}

// FlashInfer's, of BF16: y [rows, H] times BF16 weights [T, top_k], summed into out [T, H].
void finalize(TensorView y, TensorView weights, TensorView permuted, TensorView in_use, int64_t experts, TensorView out) {
  moe::dev::finalize::Data data{};
  data.mDtypeElt = dtypes::Dtype::Bfloat16;
  data.mDtypeExpW = dtypes::Dtype::Bfloat16;
  data.inPtr = y.data_ptr();
  data.outPtr = out.data_ptr();
  data.expertWeightsPtr = weights.data_ptr();
  data.expandedIdxToPermutedIdx = static_cast<int*>(permuted.data_ptr());
  data.numTokens = permuted.size(0);
  data.numExperts = experts;
  data.topK = permuted.size(1);
  data.hiddenDim = data.hiddenDimPadded = y.size(1);
  data.totalNumPaddedTokens = static_cast<int*>(in_use.data_ptr());
  moe::dev::finalize::run(data, get_stream(y.device()));
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(flashinfer_activate, activate);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(flashinfer_finalize, finalize);

}  // namespace lora_fastpath_reference
