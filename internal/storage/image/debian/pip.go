package debian

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// chroot runs programs of the new root filesystem in it, with the host's
// network. work appears in it as /run/build, and leaves no trace there.
type chroot struct {
	root, work string
	log        io.Writer
	// links are folders of the host that appear as /run/build/links/N.
	links []string
}

const seenAs = "/run/build"

// enter mounts what programs need and goes into the root. Its arguments are the
// root, the work folder, the links, "--" and the command.
const enter = `set -eu
root=$1 work=$2
shift 2
mount -t proc proc "$root/proc"
mount --bind /dev "$root/dev"
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
mount -t tmpfs tmpfs "$root/run"
mkdir "$root/run/build"
mount --bind "$work" "$root/run/build"
n=0
while [ "$1" != -- ]; do
	mount --bind "$1" "$root/run/build/links/$n"
	mount -o remount,bind,ro "$root/run/build/links/$n"
	n=$((n + 1))
	shift
done
shift
for file in /etc/resolv.conf /etc/hosts; do
	[ -e "$file" ] || continue
	rm -f "$root$file"
	: >"$root$file"
	mount --bind "$file" "$root$file"
done
exec chroot "$root" "$@"
`

func (c *chroot) run(ctx context.Context, env []string, argv ...string) ([]byte, error) {
	for i := range c.links {
		if err := os.MkdirAll(filepath.Join(c.work, "links", strconv.Itoa(i)), 0o700); err != nil {
			return nil, err
		}
	}
	args := slices.Concat([]string{"sh", "-c", enter, "enter", c.root, c.work}, c.links, []string{"--"}, argv)
	base := []string{
		"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=" + seenAs + "/home",
		"LC_ALL=C.UTF-8", "PYTHONDONTWRITEBYTECODE=1",
	}
	return runApart(ctx, c.log, append(base, env...), args...)
}

// installWheels runs the image's own pip, which knows the wheels for its
// Python, with the host's settings. It installs only wheels: that runs no code
// of them.
func (r Recipe) installWheels(ctx context.Context, in *chroot) error {
	env, err := in.pipEnvironment(ctx)
	if err != nil {
		return fmt.Errorf("take over the host's settings of pip: %w", err)
	}
	argv := []string{"python3", "-m", "pip", "install", "--no-cache-dir", "--no-compile", "--only-binary=:all:", "--no-input", "--"}
	if _, err := in.run(ctx, env, append(argv, r.Pip...)...); err != nil {
		return fmt.Errorf("install wheels %s: %w", strings.Join(r.Pip, ", "), err)
	}
	return nil
}

// compile compiles the files that pip installed. Packages contain files for
// other versions of Python, too: like pip, it ignores those that fail.
func (c *chroot) compile(ctx context.Context) error {
	_, err := c.run(ctx, nil, "sh", "-c", "PYTHONDONTWRITEBYTECODE= python3 -m compileall -q /usr/local/lib/python3*/dist-packages >/dev/null || true")
	if err != nil {
		return fmt.Errorf("compile wheels: %w", err)
	}
	return nil
}

// pipEnvironment applies the host's settings of pip in the chroot: its
// environment, its files, and the files that those name.
func (c *chroot) pipEnvironment(ctx context.Context) ([]string, error) {
	env, err := c.copySettings()
	if err != nil {
		return nil, err
	}
	// pip itself knows best how to combine its settings.
	quiet := *c
	quiet.log = nil // settings may hold credentials
	out, err := quiet.run(ctx, env, "python3", "-m", "pip", "config", "list")
	if err != nil {
		return nil, err
	}
	return c.mapPaths(env, parseSettings(string(out)))
}

// copySettings copies the host's files to the places where pip looks for them
// in the chroot: a configuration's folders, the home, and PIP_CONFIG_FILE.
func (c *chroot) copySettings() ([]string, error) {
	home, err := os.UserHomeDir()
	if err != nil {
		return nil, err
	}
	var env []string
	for _, e := range os.Environ() {
		name, value, _ := strings.Cut(e, "=")
		switch {
		case name == "PIP_CONFIG_FILE":
			if err := c.copyFile(value, "pip.conf"); err != nil {
				return nil, err
			}
			env = append(env, name+"="+seenAs+"/pip.conf")
		case strings.HasPrefix(name, "PIP_"), strings.HasSuffix(strings.ToLower(name), "_proxy"):
			env = append(env, e)
		}
	}
	config := os.Getenv("XDG_CONFIG_HOME")
	if config == "" {
		config = filepath.Join(home, ".config")
	}
	for from, to := range map[string]string{
		filepath.Join(config, "pip", "pip.conf"): "home/.config/pip/pip.conf",
		filepath.Join(home, ".pip", "pip.conf"):  "home/.pip/pip.conf",
		filepath.Join(home, ".netrc"):            "home/.netrc", // credentials of indexes
		"/etc/pip.conf":                          "xdg/0/pip/pip.conf",
		caBundle():                               "ca.pem",
		"/etc/xdg/pip/pip.conf":                  "xdg/1/pip/pip.conf",
	} {
		if err := c.copyFile(from, to); err != nil {
			return nil, err
		}
	}
	// The last file wins: the machine's own one.
	env = append(env, "XDG_CONFIG_DIRS="+seenAs+"/xdg/1:"+seenAs+"/xdg/0",
		"PIP_USER=0", "PIP_REQUIRE_VIRTUALENV=0", "PIP_BREAK_SYSTEM_PACKAGES=1", "PIP_ROOT_USER_ACTION=ignore",
		"PIP_DISABLE_PIP_VERSION_CHECK=1", "PIP_PROGRESS_BAR=off", "PIP_LOG="+seenAs+"/log")
	return env, nil
}

// caBundle is the file of certificates that the host's Python trusts.
func caBundle() string {
	for _, name := range []string{"REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE"} {
		if file := os.Getenv(name); file != "" {
			return file
		}
	}
	return "/etc/ssl/certs/ca-certificates.crt"
}

// copyFile copies a file of the host into the work folder, if there is one.
func (c *chroot) copyFile(from, to string) error {
	b, err := os.ReadFile(from)
	if os.IsNotExist(err) {
		return nil
	}
	if err != nil {
		return err
	}
	path := filepath.Join(c.work, to)
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return err
	}
	return os.WriteFile(path, b, 0o600)
}

// parseSettings reads the output of pip config list: section.name='value'. The
// environment's section is :env:. The environment has precedence, then the
// section of the command; later lines override earlier ones.
func parseSettings(out string) map[string]string {
	settings, rank := map[string]string{}, map[string]int{}
	ranks := map[string]int{"global": 1, "install": 2, ":env:": 3}
	for line := range strings.Lines(out) {
		key, value, ok := strings.Cut(strings.TrimSpace(line), "=")
		dot := strings.LastIndexByte(key, '.')
		if !ok || dot < 0 || len(value) < 2 {
			continue
		}
		section, name := key[:dot], key[dot+1:]
		if r := ranks[section]; r > rank[name] {
			rank[name] = r
			settings[name] = strings.NewReplacer(`\n`, "\n", `\\`, `\`, `\'`, `'`).Replace(value[1 : len(value)-1])
		}
	}
	return settings
}

// mapPaths makes the host's files and folders in the settings available in the
// chroot. It sets their new paths in the environment, which has precedence.
func (c *chroot) mapPaths(env []string, settings map[string]string) ([]string, error) {
	set := func(name, value string) {
		env = slices.DeleteFunc(env, func(e string) bool { return strings.HasPrefix(e, name+"=") })
		env = append(env, name+"="+value)
	}
	if _, err := os.Stat(filepath.Join(c.work, "ca.pem")); err == nil {
		set("PIP_CERT", seenAs+"/ca.pem") // the image may have no certificates
	}
	for _, name := range []string{"cert", "client-cert", "constraint"} {
		file := settings[name]
		if file == "" || strings.Contains(file, "://") {
			continue
		}
		if err := c.copyFile(file, name); err != nil {
			return nil, err
		}
		set("PIP_"+strings.ToUpper(strings.ReplaceAll(name, "-", "_")), seenAs+"/"+name)
	}
	var links []string
	for link := range strings.FieldsSeq(settings["find-links"]) {
		path := strings.TrimPrefix(link, "file://")
		if info, err := os.Stat(path); err == nil && info.IsDir() && filepath.IsAbs(path) {
			link = seenAs + "/links/" + strconv.Itoa(len(c.links))
			c.links = append(c.links, path)
		}
		links = append(links, link)
	}
	if len(links) > 0 {
		set("PIP_FIND_LINKS", strings.Join(links, " "))
	}
	return env, nil
}
