#!/bin/bash
set -e
cd /app
echo 'KINDS = ("tea", "cup", "pot")' > shop/kinds.py
sed -i 's/^from shop.orders import KINDS/from shop.kinds import KINDS/' shop/pricing.py
sed -i -e 's/^from shop.pricing import price/from shop.kinds import KINDS\nfrom shop.pricing import price/' -e '/^KINDS = /d' shop/orders.py
python3 -m shop
