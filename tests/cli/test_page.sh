#!/bin/sh
# The report's page in a browser: no messages on its console, nothing wider than the window, readable text.
. "$(dirname "$0")/lib.sh"
command -v chromium > /dev/null || { echo 'skip: no chromium' && exit 77; }

# What the console of a page in a window of this width says.
console()
{
    timeout 100 chromium --headless --no-sandbox --disable-gpu --hide-scrollbars --window-size="$1",1200 \
        --enable-logging=stderr --screenshot="$work/shot$1.png" "file://$work/$2" 2>&1 |
        sed -n 's/.*:CONSOLE[^]]*] "\(.*\)", source.*/\1/p'
}

expect 0 . capture "$small" --data "$source_dir/LICENSE" -o run.db --steps 2
expect 0 . compare run.db --vary topology=pcie_box,dgx_h100 --vary capacity=dropless,0.5,1,1.25,1.5,2,3 \
    -o run.db
expect 0 . report run.db -o page
{
    cat page/index.html
    cat << 'EOF'
<script>addEventListener('load', () => {
  const texts = [...document.querySelectorAll('svg text')].map(t => t.getBoundingClientRect());
  const small = Math.min(...texts.map(r => Math.min(r.width, r.height)).filter(x => x > 0));
  console.log(`${document.documentElement.scrollWidth} wide, text ${small >= 7 ? 'readable' : small},`,
              `${document.querySelectorAll('svg').length} figures,`,
              texts.length > 50 ? 'labelled' : texts.length);
});</script>
EOF
} > probe.html
for width in 1400 800; do
    said=$(console $width page/index.html)
    [ -z "$said" ] || fail "$width: $said"
    said=$(console $width probe.html)
    [ "$said" = "$width wide, text readable, 6 figures, labelled" ] || fail "$width: '$said'"
    [ "$(wc -c < "shot$width.png")" -gt 20000 ] || fail "$width: an empty screenshot"
done
finish
