# LIMIT 50
# One adaLN region of DiT (residual + gate, layer norm, modulation), forward + backward: the pass' op beside torch.compile.
python3 $REQ/ada.py
