#!/bin/bash
set -e
sed -i -e 's/^host = .*/host = 127.0.0.1/' -e 's/^workers = .*/workers = 16/' -e 's/^flush = .*/flush = 5/' \
    -e 's/^;rotate = daily/rotate = daily/' -e 's/^level = .*/level = warning/' /app/queue.ini
