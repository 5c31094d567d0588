// The base half of a mixture-of-experts layer on Blackwell, in stages that Python puts LoRA between: FlashInfer's routing
// of tokens into rows sorted by expert, and its TRT-LLM-gen expert GEMMs. Compiled with FlashInfer's own sources and flags
// into a library beside FlashInfer's; see patches/sm100.py. lora_fastpath/kernels/sm100.py describes and checks arguments.

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>

#include "flashinfer/exception.h"
#include "flashinfer/trtllm/batched_gemm/KernelRunner.h"
#include "flashinfer/trtllm/fused_moe/RoutingKernel.h"
#include "flashinfer/trtllm/fused_moe/runner.h"
#include "tvm_ffi_utils.h"

// Defines what FlashInfer's Python sets to hand over downloaded kernels: once in a library.
namespace flashinfer::trtllm_cubin_loader {
#include <flashinfer/cubin_loader.h>
}

namespace lora_fastpath {
namespace {

namespace dtypes = batchedGemm::trtllm::gen;
namespace routing = tensorrt_llm::kernels::trtllmgen_moe::Routing;
using Gemm = tensorrt_llm::kernels::TrtllmGenBatchedGemmRunner;
using tvm::ffi::Array;
using tvm::ffi::Optional;

int* ints(TensorView const& tensor) { return static_cast<int*>(tensor.data_ptr()); }

void* data(Optional<TensorView> const& tensor) { return tensor.has_value() ? tensor.value().data_ptr() : nullptr; }

bool is_fp4(TensorView const& x) { return x.dtype() == dl_uint8; }

// One GEMM of FlashInfer's, and what it chose for the problems seen so far: making one and asking it takes the host long.
struct Kind {
  std::unique_ptr<Gemm> gemm;
  std::map<std::tuple<int, int, int, int, int>, std::pair<int64_t, size_t>> chosen;  // configuration, workspace in bytes
};

std::mutex kinds_mutex;

Kind& kind(bool fp4, bool routed, int tile) {
  static std::map<std::tuple<bool, bool, int>, Kind> kinds;
  Kind& found = kinds[{fp4, routed, tile}];
  if (!found.gemm) {
    tensorrt_llm::kernels::TrtllmGenBatchedGemmRunnerOptions options{};
    options.dtypeA = options.dtypeB = fp4 ? dtypes::Dtype::E2m1 : dtypes::Dtype::E4m3;
    // FP8 gate_up has kernels with FP8 output alone.
    options.dtypeC = routed ? options.dtypeA : dtypes::Dtype::Bfloat16;
    options.deepSeekFp8 = !fp4;
    options.routeAct = routed;
    options.transposeMmaOutput = true;
    options.tileSize = tile;
    options.epilogueTileM = fp4 ? 128 : 64;
    options.useShuffledMatrix = fp4;  // as sglang loads the weights
    found.gemm = std::make_unique<Gemm>(options);
  }
  return found;
}

}  // namespace

// {tiles, rows} that a batch takes at most.
Array<int64_t> sizes(int64_t tokens, int64_t top_k, int64_t experts, int64_t tile) {
  int64_t tiles = routing::getMaxNumCtasInBatchDim(tokens, top_k, experts, tile);
  return {tiles, tiles * tile};
}

void route(TensorView topk_ids, TensorView weights, TensorView permuted, TensorView token_of_row, TensorView in_use,
           TensorView tile_experts, TensorView tile_ends, TensorView tiles, TensorView counts, int64_t experts,
           int64_t first_expert, int64_t local_experts, int64_t tile, bool pdl) {
  ffi::CUDADeviceGuard guard(topk_ids.device().device_id);
  moe::dev::routing::routingCustom::Data data;
  data.mUsePdl = pdl;
  data.mDtypeOutput = dtypes::Dtype::Bfloat16;  // of weights
  data.mPtrTopKIds = ints(topk_ids);
  data.mPtrTopKWeights = weights.data_ptr();
  data.mPtrExpertCounts = ints(counts);
  data.mPtrPermutedIdxSize = ints(in_use);
  data.mPtrExpandedIdxToPermutedIdx = ints(permuted);
  data.mPtrPermutedIdxToTokenIdx = ints(token_of_row);
  data.mPtrCtaIdxXyToBatchIdx = ints(tile_experts);
  data.mPtrCtaIdxXyToMnLimit = ints(tile_ends);
  data.mPtrNumNonExitingCtas = ints(tiles);
  data.mNumTokens = topk_ids.size(0);
  data.mNumExperts = experts;
  data.mTopK = topk_ids.size(1);
  data.mTileTokensDim = tile;
  data.mPaddingLog2 = __builtin_ctz(tile);
  data.mLocalExpertsStartIdx = first_expert;
  data.mLocalExpertsStrideLog2 = 0;
  data.mNumLocalExperts = local_experts;
  moe::dev::routing::routingCustom::run(data, get_stream(topk_ids.device()));
}

void gemm(TensorView x, TensorView x_scales, TensorView weights, TensorView weight_scales, Optional<TensorView> alphas,
          TensorView out, Optional<TensorView> out_scales, Optional<TensorView> token_of_row, TensorView in_use,
          TensorView tile_experts, TensorView tile_ends, TensorView tiles, int64_t tokens, int64_t top_k, int64_t tile,
          bool pdl) {
  DLDevice device = x.device();
  ffi::CUDADeviceGuard guard(device.device_id);
  int n = out.size(1), k = x.size(1) * (is_fp4(x) ? 2 : 1), experts = weights.size(0);
  int most_tiles = routing::getMaxNumCtasInBatchDim(tokens, top_k, experts, tile);
  Gemm* gemm;
  std::pair<int64_t, size_t> choice;
  {
    std::lock_guard<std::mutex> lock(kinds_mutex);
    Kind& found = kind(is_fp4(x), token_of_row.has_value(), tile);
    auto [at, fresh] = found.chosen.try_emplace({n, k, experts, (int)tokens, most_tiles});
    if (fresh) try {
        int64_t config = found.gemm->getDefaultValidConfigIndex(tokens, n, k, {}, tokens, experts, most_tiles);
        size_t bytes = found.gemm->getWorkspaceSizeInBytes(tokens, n, k, {}, tokens, experts, most_tiles, config);
        at->second = {config, bytes};
      } catch (...) {
        found.chosen.erase(at);
        throw;
      }
    gemm = found.gemm.get();
    choice = at->second;
  }
  Tensor workspace = alloc_tensor({(int64_t)choice.second}, dl_int8, device);
  gemm->run(tokens, n, k, {}, tokens, experts, most_tiles, x.data_ptr(), x_scales.data_ptr(), weights.data_ptr(),
            weight_scales.data_ptr(), /*perTokensSfA=*/nullptr, /*perTokensSfB=*/nullptr,
            static_cast<float*>(data(alphas)), /*scaleGateC=*/nullptr, /*bias=*/nullptr, /*gatedActAlpha=*/nullptr,
            /*gatedActBeta=*/nullptr, /*clampLimit=*/nullptr, out.data_ptr(), data(out_scales),
            static_cast<int*>(data(token_of_row)), ints(in_use), ints(tile_experts), ints(tile_ends), ints(tiles),
            workspace.data_ptr(), get_stream(device), device.device_id, choice.first, pdl);
}

// How many of FlashInfer's kernels fit such a GEMM, 0 for none; asks no GPU.
int64_t kernels(bool fp4, bool routed, int64_t n, int64_t k, int64_t experts, int64_t tokens, int64_t top_k,
                int64_t tile) {
  int most_tiles = routing::getMaxNumCtasInBatchDim(tokens, top_k, experts, tile);
  std::lock_guard<std::mutex> lock(kinds_mutex);
  Gemm const& gemm = *kind(fp4, routed, tile).gemm;
  int64_t count = 0;
  for (int64_t config : gemm.getPassingConfigIndices())
    count += gemm.isValidConfigIndex(config, tokens, n, k, {}, tokens, experts, most_tiles);
  return count;
}

TVM_FFI_DLL_EXPORT_TYPED_FUNC(lora_fastpath_sizes, sizes);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(lora_fastpath_route, route);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(lora_fastpath_gemm, gemm);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(lora_fastpath_kernels, kernels);

}  // namespace lora_fastpath
