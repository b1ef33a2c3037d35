# LIMIT 65
# What fused="auto" chooses between: products of an unused seed.
python3 benchmarks/fused_choice.py --out $OUT_DIR --seed 356008 --points 60 --seconds 56
