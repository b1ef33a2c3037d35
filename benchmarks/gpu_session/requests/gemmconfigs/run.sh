# LIMIT 88
# All near configs of drawn products of few rows and some of more, beside mm and addmm: what the model is fitted to.
python3 $REQ/configs.py --out $OUT_DIR --seconds 80
