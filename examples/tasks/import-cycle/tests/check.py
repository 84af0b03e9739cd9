import subprocess
import sys

PROGRAMS = {
    "-m": ["-m", "shop"],
    "orders": ["-c", "from shop.orders import Order; print(f'total: {Order([(\"pot\", 1)]).total():.2f}')"],
    "pricing": ["-c", "from shop.pricing import price, CURRENCY; print(price('tea'), CURRENCY)"],
    "source": [
        "-c",
        "import shop.pricing as p; p.PRICES['tea'] = 1.0\nfrom shop.orders import Order\nprint(Order([('tea', 3)]).total())",
    ],
}
EXPECTED = {"-m": "total: 23.80", "orders": "total: 31.50", "pricing": "7.4 EUR", "source": "3.0"}
for name, arguments in PROGRAMS.items():
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=20, cwd="/app"
    )
    if done.stdout.strip() != EXPECTED[name]:
        sys.exit(f"{name}: {done.stdout!r}, and {EXPECTED[name]!r} is right. {done.stderr}")
