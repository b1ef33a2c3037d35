# LIMIT 200
# Products of another unused seed, all contenders. Resumes where a sample.csv lies in the request's folder.
S=412988
. $REQ/quack.sh
more=
if [ -f $REQ/sample.csv ]; then cp $REQ/sample.csv $OUT_DIR/; more=--resume; fi
python3 benchmarks/sample.py --out $OUT_DIR --seed $S --kinds products --points 60 --seconds 172 --workers 18 $more
