#!/bin/bash
set -e
cat > /app/topwords.sh <<'END'
#!/bin/bash
export LC_ALL=C
tr 'A-Z' 'a-z' | tr -cs 'a-z' '\n' | sed '/^$/d' | sort | uniq -c | sort -k1,1nr -k2,2 | head -n "$1" | sed 's/^ *//'
END
chmod +x /app/topwords.sh
