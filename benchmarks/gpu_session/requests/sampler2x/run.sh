# LIMIT 110
# Expressions of the same seed. Resumes where a sample.csv lies in the request's folder.
S=541706
more=
if [ -f $REQ/sample.csv ]; then cp $REQ/sample.csv $OUT_DIR/; more=--resume; fi
python3 benchmarks/sample.py --out $OUT_DIR --seed $S --kinds expressions --points 40 --seconds 92 --workers 18 $more
