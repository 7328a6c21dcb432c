# lint.awk - the checks of lint.sh that look at lines: sizes, columns, words, layers, sources of numbers.
# Reads file names from standard input and the rules from tests/layers.txt. Prints "file:line: what is wrong".

function say(line, text)
{
    print file ":" line ": " text
    bad = 1
}

# "a/*.c b.h" as a regular expression for whole names; none matches an empty list.
function pattern(list,    n, word, i, all)
{
    n = split(list, word, " ")
    for (i = 1; i <= n; i++) {
        if (word[i] ~ /^@/) {
            word[i] = set[word[i]]
        } else {
            gsub(/[.+]/, "\\\\&", word[i])
            gsub(/\*/, "[^/]*", word[i])
        }
        all = all (i > 1 ? "|" : "") word[i]
    }
    return n ? "^(" all ")$" : "^$"
}

function read_names(table,    line, before)
{
    before = n_names
    while ((getline line < table) > 0)
        if (match(line, /\{ *"[^"]+",/)) {
            line = substr(line, RSTART, RLENGTH)
            gsub(/[{", ]/, "", line)
            name[++n_names] = line
        }
    close(table)
    if (n_names == before) say(1, "no row {\"name\", ...} in " table)
}

# One rule of layers.txt.
function read_rule(rule,    at, left, right, n, word, i)
{
    at = index(rule, ":")
    left = substr(rule, 1, at - 1)
    right = pattern(substr(rule, at + 1))
    n = split(left, word, " ")
    if (word[1] ~ /^@/) {
        set[word[1]] = substr(right, 3, length(right) - 4)
    } else if (word[1] == "names") {
        for (i = 2; i <= n; i++) read_names(word[i])
        nameless = right
    } else if (word[1] ~ /^</ || word[1] ~ /\(\)$/) {
        for (i = 1; i <= n; i++) {
            restricted[++n_restricted] = word[i]
            is_header[n_restricted] = word[i] ~ /^</
            if (is_header[n_restricted])
                key[n_restricted] = pattern(substr(word[i], 2, length(word[i]) - 2))
            else
                key[n_restricted] = "(^|[^A-Za-z0-9_])" substr(word[i], 1, length(word[i]) - 2) " *[(]"
            where[n_restricted] = right
        }
    } else {
        layer[++n_layers] = pattern(left)
        may[n_layers] = right
    }
}

function read_rules(    line, rule)
{
    file = "tests/layers.txt"
    while ((getline line < file) > 0) {
        if (line ~ /^ /) {
            rule = rule line
        } else if (line !~ /^(#|$)/) {
            if (rule) read_rule(rule)
            rule = line
        }
    }
    read_rule(rule)
    close(file)
}

# Splits a line of C into code (without strings and comments) and strings.
function split_line(line,    token)
{
    code = strings = ""
    while (line != "") {
        if (in_comment) {
            if (!match(line, /\*\//)) return
            in_comment = 0
        } else {
            if (!match(line, /"([^"\\]|\\.)*"|'([^'\\]|\\.)*'|\/\*|\/\//)) break
            token = substr(line, RSTART, RLENGTH)
            code = code substr(line, 1, RSTART - 1)
            if (token == "//") return
            if (token == "/*") in_comment = 1
            if (token ~ /^"/) strings = strings " " substr(token, 2, RLENGTH - 2)
        }
        line = substr(line, RSTART + RLENGTH)
    }
    code = code line
}

function check_include(nr, header,    i, ours)
{
    ours = header ~ /^"/ || header ~ /^<(sim|traces|runtime|kernels|reports|tests)\//
    header = substr(header, 2, length(header) - 2)
    if (ours && header !~ allowed) say(nr, "may not include " header " (tests/layers.txt)")
    for (i = 1; i <= n_restricted; i++)
        if (is_header[i] && header ~ key[i] && file !~ where[i])
            say(nr, "may not include " header " (tests/layers.txt)")
}

# A name of a table: as a word in a string; and as a part of an identifier, unless schedule.h uses it too.
function check_names(nr,    i)
{
    for (i = 1; i <= n_names; i++)
        if (strings ~ ("(^|[^A-Za-z0-9_])" name[i] "([^A-Za-z0-9_]|$)") || \
            (!(name[i] in schedule_word) && tolower(code) ~ ("(^|[^a-z0-9])" name[i] "([^a-z0-9]|$)")))
            say(nr, "names '" name[i] "', which only its lowering may know")
}

function check_c(nr, line,    i)
{
    if (line ~ /\t/) say(nr, "tab")
    if (!in_comment && match(line, /^ *# *include *["<][^">]*[">]/)) {
        line = substr(line, 1, RLENGTH)
        sub(/^ *# *include */, "", line)
        check_include(nr, line)
        return
    }
    split_line(line)
    for (i = 1; i <= n_restricted; i++)
        if (!is_header[i] && code ~ key[i] && file !~ where[i])
            say(nr, "may not call " restricted[i] " (tests/layers.txt)")
    if (file ~ nameless) check_names(nr)
}

# Functions open and close in the first column; their length counts from the first line of their head.
function check_function(nr, line)
{
    if (line ~ /^[A-Za-z_]/ && !body) head = nr
    if (line ~ /^\{$/ || line ~ /^[a-z_]+\(\) *\{$/) body = 1
    if (line ~ /^\}/ && body) {
        if (nr - head + 1 > 80) say(head, "function of " nr - head + 1 " lines, at most 80")
        body = 0
    }
}

function check_block(nr, line)
{
    if (line ~ /^[^ #\t-]/) {
        close_block()
        if (line ~ /:[ \t]*(#.*)?$/) block = nr
    }
    if (line ~ /^ +source: *[^ #]/) block = 0
}

function close_block()
{
    if (block) say(block, "block without source:")
    block = 0
}

function check_line(nr, line,    plain)
{
    if (line ~ /(^|[^A-Za-z])(TO[D]O|FIX[M]E|XX[X])([^A-Za-z]|$)/) say(nr, "left for later: make it an issue")
    if (line ~ /(^|[^A-Za-z0-9_.])\/(work|home|root|tmp|Users)\/[A-Za-z]/) say(nr, "path of one machine")
    if (is_source) {
        plain = line
        gsub(/[\200-\277]/, "", plain)
        if (length(plain) > 110) say(nr, "more than 110 columns")
        check_function(nr, line)
    }
    if (is_c) check_c(nr, line)
    if (file ~ /^topologies\/.*\.yaml$/) check_block(nr, line)
}

function check_file(    nr, line, i)
{
    is_c = file ~ /\.(c|h|cu|cuh|cc|cpp|hpp)$/
    is_source = is_c || file ~ /\.(sh|awk|gp|cmake)$/ || file ~ /(^|\/)(CMakeLists\.txt|run)$/
    in_comment = head = body = block = 0
    if (is_c) {
        for (i = 1; i <= n_layers && file !~ layer[i]; i++)
            ;
        if (i > n_layers) say(1, "no layer (tests/layers.txt)")
        allowed = i > n_layers ? "." : may[i]
    }
    while ((getline line < file) > 0) check_line(++nr, line)
    close(file)
    close_block()
    if (is_source && nr > 600) say(nr, "file of " nr " lines, at most 600")
}

BEGIN {
    read_rules()
    while ((getline line < "sim/schedule.h") > 0)
        while (match(line, /"[a-z_0-9]+"/)) {
            schedule_word[substr(line, RSTART + 1, RLENGTH - 2)] = 1
            line = substr(line, RSTART + RLENGTH)
        }
    close("sim/schedule.h")
    while ((getline file < "-") > 0) check_file()
    exit bad
}
