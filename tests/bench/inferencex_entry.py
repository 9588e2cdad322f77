"""An entry of InferenceX's master file, and its key."""

MASTER = """
kimik2.5-fp4-mi355x-vllm-eagle3-fp8:
  image: vllm/vllm-openai-rocm:nightly
  model: amd/Kimi-K2.5-MXFP4
  model-prefix: kimik2.5
  runner: mi355x
  precision: fp4
  framework: vllm
  multinode: false
  scenarios:
    fixed-seq-len:
    - {isl: 1024, osl: 1024, search-space: [{tp: 8, spec-decoding: eagle3_fp8, conc-start: 4, conc-end: 64},
                                            {tp: 4, spec-decoding: eagle3_fp8, conc-start: 4, conc-end: 64}]}
    - {isl: 1024, osl: 8192, search-space: [{tp: 8, spec-decoding: eagle3_fp8, conc-start: 4, conc-end: 64},
                                            {tp: 4, spec-decoding: eagle3_fp8, conc-start: 4, conc-end: 64}]}
"""
KEY = "kimik2.5-fp4-mi355x-vllm-eagle3-fp8"
