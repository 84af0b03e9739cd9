#!/bin/bash
set -e
cat > /app/archive.sh <<'END'
#!/bin/bash
shopt -s nullglob dotglob
count=0
mkdir -p -- "$2"
case $1 in /*) from=$1 ;; *) from=./$1 ;; esac
for file in "$from"/*.txt; do
    [ -f "$file" ] || continue
    cp -- "$file" "$2/"
    count=$((count + 1))
done
echo "$count"
END
