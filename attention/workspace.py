"""Memory that attention on a GPU takes beside weights and cache, counted in the memory plan."""

# Expanded keys and values of a prefill's round. At 128 heads of 128 + 128 in bf16 these are 4096
# keys: enough that the kernel, and not the expansion, takes the time.
EXPANDED_BYTES = 256 << 20

# Index scores that exist at once, fp32: 4096 queries of a prompt against 16k keys. A decode of 256
# tokens fits up to 262144 keys; more are scored in turns.
SCORES_BYTES = 256 << 20
